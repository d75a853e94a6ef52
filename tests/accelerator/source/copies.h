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

/// The host waits for all that was asked of the devices, or for a part of it.
void wait() {
  ++num_waits;
  drain_all();
}
void wait(const Clock& clock) {
  ++num_waits;
  wait_for(clock);
}

std::atomic<int64_t> bytes_up{0}, bytes_down{0};
/// A copy that is done later: it reads its source then, and its target holds 0x7f bytes until then.
void copy_later(const at::Tensor& source, const at::Tensor& target, const Views& from, const Views& to, bool is_raced) {
  const auto device = from.device ? *from.device : *to.device;
  std::memset(target.data_ptr(), kPoison, target.nbytes());
  std::vector<void*> blocks;
  for (const auto* views : {&from, &to})
    for (const auto& [own, seen] : views->cpu_of) blocks.push_back(own->mutable_data());
  const auto run = [source, target, is_raced] {
    at::AutoDispatchBelowADInplaceOrView below;
    if (!is_raced) const_cast<at::Tensor&>(target).copy_(source);
  };
  enqueue(here(device.index()), run, blocks);
  for (const auto& [own, seen] : to.cpu_of) note_write(here(device.index()), own->mutable_data());
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  Views views_from, views_to;
  const bool up = from.device().is_cpu(), down = to.device().is_cpu();
  if (up) bytes_up += from.nbytes();
  if (down) bytes_down += from.nbytes();
  const auto& host = up ? from : to;
  const bool is_late = non_blocking && asynchronous && (up || down) && host.numel() > 0 &&
                       Pinned::has(host.storage().data()) && from.dtype() == to.dtype() &&
                       to.is_non_overlapping_and_dense();
  const at::Tensor source = views_from.to_cpu(from), target = views_to.to_cpu(to);
  if (is_late) {
    copy_later(source, target, views_from, views_to, views_from.is_raced);
    return to;
  }
  if (down) {
    ++num_waits;
    drain(here(from.device().index()));
  }
  {
    Inside guard(from.device().type() == kSim ? from.device().index() : to.device().index());
    const_cast<at::Tensor&>(target).copy_(source);
  }
  if (down && views_from.is_raced) std::memset(target.data_ptr(), kPoison, target.nbytes());
  if (!down) note_write(here(to.device().index()), to.storage().mutable_data());
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
void record_stream(at::Tensor& self, at::Stream stream) {
  record_use(self.storage().mutable_data(), {stream.device_index(), stream.id()});
}

}  // namespace sim
