// A simulated accelerator for PyTorch (PrivateUse1): memory is the host's, kernels are the CPU's, but tensors live on
// a device of their own ("sim"), with a byte limit, a caching allocator if asked for, streams, events and generators.
//
// Every operator that has a CPU kernel is registered with one boxed kernel: inputs are seen as CPU tensors over the
// same memory, whatever the CPU kernel allocates is taken from the device's arena (results and workspaces), and
// results become tensors of the device without a copy.
#include <ATen/autocast_mode.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

#include "copies.h"
#include "device.h"
#include "operators.h"

namespace sim {

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("batch_norm", batch_norm); }

// Else a conjugated view is resolved by a copy, which resolves it by a copy, ...
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("cudnn_batch_norm", cudnn_batch_norm);
  m.impl("cudnn_batch_norm_backward", cudnn_batch_norm_backward);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("_scaled_dot_product_fused_attention_overrideable", overrideable_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", overrideable_attention_backward);
  m.impl("_scaled_dot_product_efficient_attention", efficient_attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_attention_backward);
}

std::vector<c10::RegistrationHandleRAII>& handles() {
  static auto* h = new std::vector<c10::RegistrationHandleRAII>;
  return *h;
}

/// Operators with a CPU kernel of their own use it, also where PyTorch has a composite for devices without one.
int register_kernels() {
  auto& dispatcher = c10::Dispatcher::singleton();
  int n = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    if (name.name == "aten::_efficientzerotensor") continue;
    handles().push_back(dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1,
                                                c10::KernelFunction::makeFromBoxedFunction<&kernel>(), std::nullopt,
                                                nullptr, "sim"));
    ++n;
  }
  return n;
}
}  // namespace sim

namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#undef LOWER
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FULL)
#undef FULL
#define OPTIONAL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(OPTIONAL)
#undef OPTIONAL
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
#undef PROMOTE
}
}  // namespace at::autocast

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.def("start", [] {
    c10::SetAllocator(kSim, &sim_allocator);
    c10::SetCPUAllocator(&cpu_shim, 100);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return register_kernels();
  });
  m.def("device_count", &num_devices);
  m.def("current_device", [] { return current; });
  m.def("set_device", [](int i) { Guard().setDevice(Device(kSim, i)); });
  m.def("set_limit", [](int i, std::optional<size_t> n) { arena(i).limit = n.value_or(SIZE_MAX); });
  m.def("set_caching", [](int i, bool on) {
    auto& a = arena(i);
    std::lock_guard<std::mutex> l(a.mutex);
    a.release_cached();
    a.caching = on;
  });
  m.def("fail_in", [](int i, int64_t n) { arena(i).fail_in = n; });
  m.def("allocations", [](int i) { return arena(i).allocations; });
  m.def("set_strict", [](bool on) { strict = on; });
  m.def("set_asynchronous", [](bool on) {
    drain_all();
    Locked l(queue_mutex);
    writes.clear();
    recorded.clear();
    homes.clear();
    streams.clear();
    asynchronous = on;
  });
  m.def("set_attention", [](int n) { attention = n; });
  m.def("set_counted", [](bool on) { counted = on; });
  m.def("set_cudnn_norm", [](bool on) { cudnn_norm = on; });
  m.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"calls", num_calls},          {"waits", num_waits},       {"copied", num_copied},
        {"bytes_up", bytes_up},        {"bytes_down", bytes_down}, {"pinned", Pinned::live},
        {"pinned_peak", Pinned::peak}, {"late", num_late},         {"races", num_races}};
  });
  m.def("manual_seed", [](int i, uint64_t s) { own_of(default_generator(i)).set_current_seed(s); });
  m.def("seed", [](int i) { return own_of(default_generator(i)).seed(); });
  m.def("initial_seed", [](int i) { return default_generator(i).current_seed(); });
  m.def("get_rng_state", [](int i) { return default_generator(i).get_state(); });
  m.def("set_rng_state",
        [](int i, const at::Tensor& s) { const_cast<at::Generator&>(default_generator(i)).set_state(s); });
}
