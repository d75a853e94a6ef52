// The one kernel of all operators that have a CPU kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include <string>
#include <unordered_set>

#include "random.h"
#include "views.h"

namespace sim {

std::atomic<int64_t> num_calls{0};
/// How often the host has waited for the device: copies to the host, values that the host reads, explicit waiting.
std::atomic<int64_t> num_waits{0};

const std::unordered_set<std::string> kMixed = {
    // As on CUDA: these take operands from the host.
    "aten::index.Tensor",     "aten::index.Tensor_out",      "aten::index_put_", "aten::index_put",
    "aten::_index_put_impl_", "aten::_pack_padded_sequence", "aten::resize_",    "aten::repeat_interleave.Tensor"};

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++num_calls;
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) ++num_waits;
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size(), first = stack->size() - n;
  Views views;
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t i = first; i < first + n; ++i) {
    auto& value = (*stack)[i];
    const auto* alias = schema.arguments()[i - first].alias_info();
    if (alias != nullptr && alias->isWrite()) views.note(value);
    if (value.isTensor())
      value = views.to_cpu(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<at::Tensor> seen;
      for (const at::Tensor& t : value.toTensorVector()) seen.push_back(views.to_cpu(t));
      value = seen;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> seen;
      for (const auto& t : value.toOptionalTensorVector())
        seen.push_back(t.has_value() && t->defined() ? std::optional<at::Tensor>(views.to_cpu(*t)) : t);
      value = seen;
    } else if (value.isDevice()) {
      const auto device = value.toDevice();
      if (device.type() == kSim) views.device = Device(kSim, device.has_index() ? device.index() : current);
      value = Device(c10::kCPU);
    } else if (value.isGenerator()) {
      auto& own = own_of(value.toGenerator());
      own.begin_draw(views.numel);
      value = own.inner;
      draws = false;
    }
  }
  if (!views.device) views.device = Device(kSim, current);
  if (strict && views.host_operand)
    TORCH_CHECK(kMixed.count(c10::toString(schema.operator_name())),
                "Expected all tensors to be on the same device, but found at least two devices, ", *views.device,
                " and cpu! (", schema.operator_name(), ")");
  {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
    Inside guard(views.device->index());
    std::optional<Lent> lent;
    if (draws) {
      own_of(default_generator(views.device->index())).begin_draw(views.numel);
      lent.emplace(views.device->index());
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  views.write_back();
  for (const auto& own : views.written) note_write(here(views.device->index()), own.mutable_data());
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor())
      value = views.to_sim(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& t : value.toTensorVector()) made.push_back(views.to_sim(t));
      value = made;
    }
  }
}

}  // namespace sim
