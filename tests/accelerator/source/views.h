// Tensors of a device seen as CPU tensors over the same memory, and back.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <optional>
#include <unordered_map>

#include "allocators.h"

namespace sim {

struct Held {
  c10::Storage storage;
};
void drop(void* held) { delete static_cast<Held*>(held); }

std::atomic<int64_t> num_copied{0};
bool strict = true;

c10::intrusive_ptr<c10::StorageImpl> storage_over(c10::DataPtr data, size_t n, c10::Allocator* allocator) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), n, std::move(data), allocator,
                                               true);
}
at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

struct Views {
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_of, sim_of;  // sim -> cpu and back.
  std::unordered_map<c10::TensorImpl*, at::Tensor> original;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // (sim, cpu), to see what was resized.
  std::optional<Device> device, host_operand;
  int64_t numel = 0;      // Of the first tensor of the device.
  bool is_raced = false;  // Whether something is read that another stream may not have written yet.

  std::vector<c10::Storage> written;  // Operands that the operator says it writes to.

  void note(const c10::IValue& value) {
    if (!asynchronous) return;
    const auto tensors = value.isTensor()       ? std::vector<at::Tensor>{value.toTensor()}
                         : value.isTensorList() ? value.toTensorVector()
                                                : std::vector<at::Tensor>{};
    for (const auto& t : tensors)
      if (t.defined() && t.device().type() == kSim) written.push_back(t.storage());
  }
  at::Tensor to_cpu(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (t.device().type() != kSim) {
      if (t.dim() > 0 && t.device().is_cpu()) host_operand = t.device();
      return t;
    }
    TORCH_CHECK(t.layout() == c10::kStrided && t.has_storage(), "sim has strided tensors only");
    if (!device) {
      device = t.device();
      numel = t.numel();
    }
    TORCH_CHECK(!strict || *device == t.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                t.device(), "!");
    auto* own = t.storage().unsafeGetStorageImpl();
    auto it = cpu_of.find(own);
    if (it == cpu_of.end()) {
      if (asynchronous) drain(here(device->index()));
      is_raced |= !is_ordered(here(device->index()), own->mutable_data());
      void* data = own->mutable_data();
      it = cpu_of.emplace(own, c10::Storage(storage_over({data, Device(c10::kCPU)}, own->nbytes(), &cpu_shim))).first;
      sim_of.emplace(it->second.unsafeGetStorageImpl(), t.storage());
    }
    auto seen = tensor_over(it->second, c10::DispatchKey::CPU, t);
    original.emplace(seen.unsafeGetTensorImpl(), t);
    pairs.emplace_back(t, seen);
    return seen;
  }
  at::Tensor to_sim(const at::Tensor& t) {
    if (!t.defined() || t.device().type() == kSim) return t;
    if (auto it = original.find(t.unsafeGetTensorImpl()); it != original.end()) return it->second;
    auto* own = t.storage().unsafeGetStorageImpl();
    auto it = sim_of.find(own);
    if (it == sim_of.end()) {
      const Device to = *device;
      if (own->nbytes() > 0 && !is_device_memory(own->mutable_data())) {
        ++num_copied;
        c10::DeviceGuard guard(to);
        auto made = storage_over(sim_allocator.allocate(own->nbytes()), own->nbytes(), &sim_allocator);
        std::memcpy(made->mutable_data(), own->data(), own->nbytes());
        it = sim_of.emplace(own, c10::Storage(std::move(made))).first;
      } else {
        void* data = own->mutable_data();
        it = sim_of
                 .emplace(own, c10::Storage(storage_over({data, new Held{t.storage()}, &drop, to}, own->nbytes(),
                                                         &sim_allocator)))
                 .first;
      }
    }
    note_write(here(device->index()), it->second.unsafeGetStorageImpl()->mutable_data());
    return tensor_over(it->second, c10::DispatchKey::PrivateUse1, t);
  }
  /// An operator may have given a result another size, and other memory.
  void write_back() {
    for (auto& [own, seen] : pairs) {
      auto* to = own.storage().unsafeGetStorageImpl();
      auto* from = seen.storage().unsafeGetStorageImpl();
      if (sim_of.count(from) && from->data() != to->data()) {
        c10::DataPtr data = std::move(from->mutable_data_ptr());
        void* p = data.get();
        data.unsafe_set_device(own.device());
        to->set_nbytes(from->nbytes());
        to->set_data_ptr_noswap(std::move(data));
        from->set_data_ptr_noswap({p, Device(c10::kCPU)});
      }
      if (own.sizes() != seen.sizes() || own.strides() != seen.strides() ||
          own.storage_offset() != seen.storage_offset())
        own.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides(), seen.storage_offset());
    }
  }
};

}  // namespace sim
