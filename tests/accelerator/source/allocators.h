// The allocators: of a device, of CPU kernels that run for a device, and of pinned host memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>

#include "arena.h"
#include "queue.h"

namespace sim {

void release(void* p) {
  if (p == nullptr) return;
  for (int i = 0; i < num_devices(); ++i)
    if (const size_t size = arena(i).size_of(p)) {
      if (!keep_for_late(p, size, i, [i, p] { arena(i).free(p); })) arena(i).free(p);
      return;
    }
  c10::GetDefaultCPUAllocator()->raw_deleter()(p);
}
bool is_device_memory(void* p) {
  for (int i = 0; i < num_devices(); ++i)
    if (arena(i).owns(p)) return true;
  return false;
}
struct Inside {
  int before;
  explicit Inside(int device) : before(inside) { inside = device; }
  ~Inside() { inside = before; }
};

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = arena(current).allocate(n, current);
    note_home(p, here(current));
    return {p, p, &release, Device(kSim, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int i = 0; i < num_devices(); ++i) {
      std::lock_guard<std::mutex> l(arena(i).mutex);
      arena(i).release_cached();
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data.get(), {stream.device_index(), stream.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex i) override {
    std::lock_guard<std::mutex> l(arena(i).mutex);
    return arena(i).stats;
  }
  void resetAccumulatedStats(DeviceIndex i) override {}
  void resetPeakStats(DeviceIndex i) override {
    std::lock_guard<std::mutex> l(arena(i).mutex);
    auto& s = arena(i).stats;
    for (auto* a :
         {&s.allocated_bytes, &s.active_bytes, &s.requested_bytes, &s.reserved_bytes, &s.allocation, &s.segment})
      (*a)[Arena::kAll].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex i) override {
    auto& a = arena(i);
    std::lock_guard<std::mutex> l(a.mutex);
    const size_t total = std::min<size_t>(a.limit, size_t(1) << 40);
    return {total - std::min(total, a.taken), total};
  }
};

/// What a CPU kernel allocates while it runs for the device is the device's memory; all else is the CPU's as before.
struct CpuShim final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (inside < 0) return c10::GetDefaultCPUAllocator()->allocate(n);
    void* p = arena(inside).allocate(n, inside);
    note_home(p, here(inside));
    return {p, p, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
SimAllocator sim_allocator;
CpuShim cpu_shim;

/// Pinned host memory: ordinary memory whose addresses are remembered.
struct Pinned final : at::HostAllocator {
  static std::mutex mutex;
  static std::map<char*, size_t> ranges;
  static size_t live, peak;
  static void unpin(void* p) {
    if (p == nullptr) return;
    {
      std::lock_guard<std::mutex> l(mutex);
      auto it = ranges.find(static_cast<char*>(p));
      live -= it->second;
      ranges.erase(it);
    }
    ::free(p);
  }
  static bool has(const void* p) {
    std::lock_guard<std::mutex> l(mutex);
    auto it = ranges.upper_bound(static_cast<char*>(const_cast<void*>(p)));
    if (it == ranges.begin()) return false;
    --it;
    return static_cast<const char*>(p) < it->first + it->second;
  }
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &unpin, Device(c10::kCPU)};
    char* p = Arena::host(n);
    std::lock_guard<std::mutex> l(mutex);
    ranges[p] = n;
    live += n;
    peak = std::max(peak, live);
    return {p, p, &unpin, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
std::mutex Pinned::mutex;
std::map<char*, size_t> Pinned::ranges;
size_t Pinned::live = 0, Pinned::peak = 0;
Pinned pinned;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &pinned);

}  // namespace sim
