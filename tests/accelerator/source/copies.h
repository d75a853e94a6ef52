// New tensors, copies between host and device, and tensors that are given another storage.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ops/set_native.h>

#include "kernel.h"

namespace sim {

Device device_of(std::optional<Device> d) {
  return Device(kSim, d && d->has_index() ? d->index() : static_cast<DeviceIndex>(current));
}
at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                 std::optional<Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_generic(size, &sim_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_strided_generic(
      size, stride, &sim_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

/// Copies to the host that were asked not to block are done when somebody waits: until then the target holds 0x7f
/// bytes.
struct Pending {
  at::Tensor to, from;
};
std::mutex pending_mutex;
std::vector<Pending>& pending() {
  static auto* p = new std::vector<Pending>;
  return *p;
}
bool asynchronous = false;
void finish_copies() {
  std::vector<Pending> due;
  {
    std::lock_guard<std::mutex> l(pending_mutex);
    due.swap(pending());
  }
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& [to, from] : due) to.copy_(from);
}

/// The host waits for the device.
void wait() {
  ++num_waits;
  finish_copies();
}

std::atomic<int64_t> bytes_up{0}, bytes_down{0};
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  Views views_from, views_to;
  const at::Tensor source = views_from.to_cpu(from), target = views_to.to_cpu(to);
  if (from.device().is_cpu()) {
    finish_copies();
    bytes_up += from.nbytes();
  }
  if (to.device().is_cpu()) {
    bytes_down += from.nbytes();
    if (non_blocking && asynchronous && Pinned::has(to.data_ptr())) {
      at::Tensor kept = source.clone();
      std::memset(target.data_ptr(), 0x7f, target.nbytes());
      std::lock_guard<std::mutex> l(pending_mutex);
      pending().push_back({target, kept});
      return to;
    }
    ++num_waits;
    finish_copies();
  }
  {
    Inside guard(from.device().type() == kSim ? from.device().index() : to.device().index());
    const_cast<at::Tensor&>(target).copy_(source);
  }
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage s) { return at::native::set_(self, std::move(s)); }
at::Tensor& set_storage_offset(at::Tensor& self, at::Storage s, int64_t offset, c10::IntArrayRef size,
                               c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(s), offset, size, stride);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) { return at::native::set_tensor_(self, other); }
at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage s(storage_over(sim_allocator.allocate(0), 0, &sim_allocator));
  return self.set_(s, 0, {0}, {});
}
void record_stream(at::Tensor&, at::Stream) {}

}  // namespace sim
