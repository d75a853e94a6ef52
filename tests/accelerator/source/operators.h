// Operators that PyTorch asks of devices in a form of their own: convolution, attention, normalisation, recurrent
// cells.
#pragma once

#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>

#include "kernel.h"

namespace sim {

// Which attention: 0 the mathematical one, 1 the CPU's flash attention (the CPU's numbers), 2 `efficient`, as on CUDA,
// 3 `overrideable`.
int attention = 1;
int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool gqa) {
  if (attention == 0) return static_cast<int64_t>(sdp::SDPBackend::math);
  if (attention == 2) return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
  if (attention == 3) return static_cast<int64_t>(sdp::SDPBackend::overrideable);
  return at::native::_fused_sdp_choice_cpp(q, k, v, mask, dropout, causal, scale,
                                           gqa);  // Also asked with fake tensors.
}

using OptionalTensor = std::optional<at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
/// A call of a CPU operator on tensors of the device.
template <class Function>
auto on_cpu(Views& views, Function function) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  Inside guard(views.device->index());
  return function();
}
/// The same for operators whose own kernels on devices need no memory beside their results.
template <class Function>
auto without_workspace(Views& views, Function function) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  Inside guard(-1);
  return function();
}
OptionalTensor seen(Views& v, const OptionalTensor& t) {
  return t.has_value() && t->defined() ? OptionalTensor(v.to_cpu(*t)) : std::nullopt;
}

/// PyTorch asks devices that it does not know for a convolution of their own: here it is the CPU's, oneDNN and all.
/// Its results are contiguous, as PyTorch's fake tensors promise for such devices.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  Views v;
  const auto i = v.to_cpu(input), w = v.to_cpu(weight);
  const auto b = seen(v, bias);
  return v.to_sim(on_cpu(v, [&] {
    return at::convolution(i, w, b, stride, padding, dilation, transposed, output_padding, groups).contiguous();
  }));
}
Three convolution_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                           c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                           bool transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Views v;
  const auto g = v.to_cpu(grad), i = v.to_cpu(input), w = v.to_cpu(weight);
  const std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [a, b, c] = on_cpu(v, [&] {
    auto [x, y, z] =
        at::convolution_backward(g, i, w, bias, stride, padding, dilation, transposed, output_padding, groups, mask);
    return Three{mask[0] ? x.contiguous() : x, mask[1] ? y.contiguous() : y, z};
  });
  return {v.to_sim(a), v.to_sim(b), v.to_sim(c)};
}

// CUDA's `efficient` attention. Without dropout it is the CPU's flash attention. With dropout the mask is made inside
// the operator from a seed and an offset, which it hands out: the backward pass makes the same mask from them.

/// Which scores are kept, and by how much they grow.
at::Tensor kept_scores(const at::Tensor& scores, uint64_t seed, uint64_t offset, double dropout) {
  auto generator = at::detail::createCPUGenerator(mixed(seed, offset, scores.numel()));
  return at::empty_like(scores).bernoulli_(1 - dropout, generator).div_(1 - dropout);
}
struct Scores {
  at::Tensor probabilities, logsumexp;
  double scale;
};
Scores scores_of(const at::Tensor& q, const at::Tensor& k, const OptionalTensor& bias, bool causal,
                 std::optional<double> scale) {
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))));
  auto scores = at::matmul(q, k.transpose(-2, -1)).mul_(factor);
  if (bias) scores.add_(*bias);
  if (causal) {
    const auto later = at::ones({q.size(-2), k.size(-2)}, q.options().dtype(at::kBool)).triu(1);
    scores.masked_fill_(later, -std::numeric_limits<double>::infinity());
  }
  return {at::softmax(scores, -1), at::logsumexp(scores, {-1}), factor};
}

using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
Four efficient_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& bias,
                         bool, double dropout, bool causal, std::optional<double> scale) {
  Views views;
  const auto a = views.to_cpu(q), b = views.to_cpu(k), c = views.to_cpu(v);
  const auto mask = seen(views, bias);
  const auto number = [&](int64_t n) { return at::full({}, n, q.options().dtype(at::kLong)); };
  if (dropout == 0.0) {
    auto [out, lse] = on_cpu(
        views, [&] { return at::_scaled_dot_product_flash_attention_for_cpu(a, b, c, 0.0, causal, mask, scale); });
    return {views.to_sim(out), views.to_sim(lse), number(0), number(0)};
  }
  auto& generator = own_of(default_generator(q.device().index()));
  const auto [seed, offset] = generator.hand_out(q.size(0) * q.size(1) * q.size(2) * k.size(2));
  auto [out, lse] = without_workspace(views, [&, seed = seed, offset = offset] {
    const auto scores = scores_of(a, b, mask, causal, scale);
    const auto kept = kept_scores(scores.probabilities, seed, offset, dropout);
    const auto result = at::matmul(scores.probabilities * kept, c);
    return std::make_pair(result.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp);
  });
  return {views.to_sim(out), views.to_sim(lse), number(seed), number(offset)};
}
Four efficient_attention_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const at::Tensor& bias, const at::Tensor& out, const at::Tensor& lse,
                                  const at::Tensor& seed, const at::Tensor& offset, double dropout,
                                  std::array<bool, 4> wanted, bool causal, std::optional<double> scale) {
  Views views;
  const auto g = views.to_cpu(grad), a = views.to_cpu(q), b = views.to_cpu(k), c = views.to_cpu(v);
  const auto o = views.to_cpu(out), l = views.to_cpu(lse), s = views.to_cpu(seed), f = views.to_cpu(offset);
  const auto mask = seen(views, bias);
  if (dropout == 0.0 && !wanted[3]) {
    auto [x, y, z] = on_cpu(views, [&] {
      return at::_scaled_dot_product_flash_attention_for_cpu_backward(g, a, b, c, o, l, 0.0, causal, mask, scale);
    });
    return {views.to_sim(x), views.to_sim(y), views.to_sim(z), at::Tensor()};
  }
  auto [x, y, z, w] = without_workspace(views, [&]() -> Four {
    const auto scores = scores_of(a, b, mask, causal, scale);
    const auto& p = scores.probabilities;
    const auto kept = dropout == 0.0 ? at::ones_like(p) : kept_scores(p, s.item<int64_t>(), f.item<int64_t>(), dropout);
    const auto dp = at::matmul(g, c.transpose(-2, -1)) * kept;
    const auto ds = (dp - (dp * p).sum(-1, true)) * p;
    return {at::matmul(ds, b) * scores.scale, at::matmul(ds.transpose(-2, -1), a) * scores.scale,
            at::matmul((p * kept).transpose(-2, -1), g), wanted[3] ? ds : at::Tensor()};
  });
  return {views.to_sim(x), views.to_sim(y), views.to_sim(z), views.to_sim(w)};
}

// The operator for devices that PyTorch does not know, over the same kernels.

using Nine = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor,
                        at::Tensor, at::Tensor>;
Nine overrideable_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& bias,
                            double dropout, bool causal, bool, std::optional<double> scale) {
  auto [out, lse, seed, offset] = efficient_attention(q, k, v, bias, true, dropout, causal, scale);
  const auto nothing = at::empty({0}, q.options());
  return {out, lse, nothing, nothing, q.size(2), k.size(2), seed, offset, nothing};
}
Four overrideable_attention_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v, const at::Tensor& bias, std::array<bool, 4> mask,
                                     const at::Tensor& out, const at::Tensor& lse, const at::Tensor&, const at::Tensor&,
                                     int64_t, int64_t, double dropout, bool causal, const at::Tensor& seed,
                                     const at::Tensor& offset, std::optional<double> scale) {
  return efficient_attention_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, mask, causal, scale);
}

/// If asked for, batch normalisation is CUDA's operator, which updates its statistics although its schema does not say
/// so.
bool cudnn_norm = false;
at::Tensor batch_norm(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& mean, const OptionalTensor& variance, bool training, double momentum,
                      double eps, bool cudnn) {
  if (cudnn_norm && weight.has_value() && weight->defined())
    return std::get<0>(at::cudnn_batch_norm(input, *weight, bias, mean, variance, training, momentum, eps));
  return std::get<0>(at::_batch_norm_impl_index(input, weight, bias, mean, variance, training, momentum, eps, cudnn));
}
Four cudnn_batch_norm(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& mean, const OptionalTensor& variance, bool training, double momentum,
                      double eps) {
  Views v;
  const auto i = v.to_cpu(input), w = v.to_cpu(weight);
  const auto b = seen(v, bias), m = seen(v, mean), r = seen(v, variance);
  auto [x, y, z] = on_cpu(v, [&] { return at::native_batch_norm(i, w, b, m, r, training, momentum, eps); });
  return {v.to_sim(x), v.to_sim(y), v.to_sim(z), at::empty({0}, input.options().dtype(at::kByte))};
}
Three cudnn_batch_norm_backward(const at::Tensor& input, const at::Tensor& grad, const at::Tensor& weight,
                                const OptionalTensor& mean, const OptionalTensor& variance,
                                const OptionalTensor& saved_mean, const OptionalTensor& saved_variance, double eps,
                                const at::Tensor&) {
  Views v;
  const auto i = v.to_cpu(input), g = v.to_cpu(grad), w = v.to_cpu(weight);
  const auto m = seen(v, mean), r = seen(v, variance), a = seen(v, saved_mean), b = seen(v, saved_variance);
  auto [x, y, z] =
      on_cpu(v, [&] { return at::native_batch_norm_backward(g, i, w, m, r, a, b, true, eps, {true, true, true}); });
  return {v.to_sim(x), v.to_sim(y), v.to_sim(z)};
}

// The recurrent cells that PyTorch uses on devices without a recurrent layer of their own.

Three lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
                const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  Views v;
  const auto i = v.to_cpu(input_gates), h = v.to_cpu(hidden_gates), c = v.to_cpu(cx);
  const auto b = seen(v, input_bias), d = seen(v, hidden_bias);
  auto [hy, cy, gates] = without_workspace(v, [&]() -> Three {
    auto sum = i + h;
    if (b) sum += *b;
    if (d) sum += *d;
    auto parts = sum.chunk(4, 1);
    for (int n : {0, 1, 3}) parts[n].sigmoid_();
    parts[2].tanh_();
    auto state = parts[1] * c + parts[0] * parts[2];
    return {parts[3] * state.tanh(), state, sum};
  });
  return {v.to_sim(hy), v.to_sim(cy), v.to_sim(gates)};
}
Three lstm_cell_backward(const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const at::Tensor& cx,
                         const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  Views v;
  const auto c = v.to_cpu(cx), state = v.to_cpu(cy), gates = v.to_cpu(workspace);
  const auto gh = seen(v, grad_hy), gc = seen(v, grad_cy);
  auto [grad_gates, grad_cx, grad_bias] = without_workspace(v, [&]() -> Three {
    const auto parts = gates.chunk(4, 1);
    const auto tanh = state.tanh();
    auto flow = gc ? *gc : at::zeros_like(state);
    auto output = at::zeros_like(state);
    if (gh) {
      flow = flow + *gh * parts[3] * (1 - tanh * tanh);
      output = *gh * tanh * parts[3] * (1 - parts[3]);
    }
    auto all = at::cat({flow * parts[2] * parts[0] * (1 - parts[0]), flow * c * parts[1] * (1 - parts[1]),
                        flow * parts[0] * (1 - parts[2] * parts[2]), output},
                       1);
    return {all, flow * parts[1], has_bias ? all.sum(0) : at::Tensor()};
  });
  return {v.to_sim(grad_gates), v.to_sim(grad_cx), v.to_sim(grad_bias)};
}

/// Keeps the gates r, z, n, the state before, and the hidden part of n, as CUDA's kernel does.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hx, const OptionalTensor& input_bias,
                                            const OptionalTensor& hidden_bias) {
  Views v;
  const auto i = v.to_cpu(input_gates), h = v.to_cpu(hidden_gates), x = v.to_cpu(hx);
  const auto b = seen(v, input_bias), d = seen(v, hidden_bias);
  auto [hy, kept] = without_workspace(v, [&] {
    const auto from_input = (b ? i + *b : i).chunk(3, 1), from_hidden = (d ? h + *d : h).chunk(3, 1);
    const auto r = (from_input[0] + from_hidden[0]).sigmoid(), z = (from_input[1] + from_hidden[1]).sigmoid();
    const auto n = (from_input[2] + r * from_hidden[2]).tanh();
    return std::make_pair((x - n) * z + n, at::cat({r, z, n, x, from_hidden[2]}, 1));
  });
  return {v.to_sim(hy), v.to_sim(kept)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad_hy,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias) {
  Views v;
  const auto g = v.to_cpu(grad_hy), kept = v.to_cpu(workspace);
  auto [from_input, from_hidden, before, input_bias, hidden_bias] = without_workspace(v, [&] {
    const auto parts = kept.chunk(5, 1);
    const auto &r = parts[0], &z = parts[1], &n = parts[2], &x = parts[3], &hidden = parts[4];
    const auto dz = g * (x - n) * z * (1 - z), dn = g * (1 - z) * (1 - n * n), dr = dn * hidden * r * (1 - r);
    const auto first = at::cat({dr, dz, dn}, 1), second = at::cat({dr, dz, dn * r}, 1);
    return std::make_tuple(first, second, g * z, has_bias ? first.sum(0) : at::Tensor(),
                           has_bias ? second.sum(0) : at::Tensor());
  });
  return {v.to_sim(from_input), v.to_sim(from_hidden), v.to_sim(before), v.to_sim(input_bias), v.to_sim(hidden_bias)};
}

}  // namespace sim
