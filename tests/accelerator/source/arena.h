// The memory of the simulated devices: a byte limit, counters, allocations that fail on demand, and, if asked for, the
// blocks and segments of PyTorch's caching allocators.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

namespace sim {
using c10::Device;
using c10::DeviceIndex;
constexpr auto kSim = c10::DeviceType::PrivateUse1;

constexpr size_t kBlock = 512, kSmall = 1 << 20, kSmallSegment = 2 << 20, kLargeSegment = 20 << 20,
                 kMinLarge = 10 << 20;
size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct Block {
  char* at;
  size_t size, asked;
  bool used;
  char* segment;
  bool small;
};

/// The memory of one device. `caching` follows the rules of torch's caching allocators: blocks of 512 bytes, cut from
/// segments of 2 MiB, 20 MiB or their own size; a segment goes back only if all of it is free.
struct Arena {
  std::mutex mutex;
  size_t limit = SIZE_MAX, taken = 0;  // `taken` from the device: live bytes, or segments if caching.
  bool caching = false;
  int64_t ooms = 0, retries = 0, fail_in = -1;  // `fail_in`: the n-th allocation from now fails.
  int64_t allocations = 0;
  c10::CachingDeviceAllocator::DeviceStats stats;
  std::unordered_map<void*, size_t> plain;
  std::map<char*, Block> blocks;                              // By address: neighbours merge.
  std::set<std::pair<size_t, char*>> free_small, free_large;  // Best fit.
  std::unordered_map<char*, size_t> segments;

  static constexpr size_t kAll = 0;
  void count(int64_t live, int64_t asked) {
    auto add = [](c10::CachingAllocator::Stat& s, int64_t n) { n >= 0 ? s.increase(n) : s.decrease(-n); };
    add(stats.allocated_bytes[kAll], live);
    add(stats.active_bytes[kAll], live);
    add(stats.requested_bytes[kAll], asked);
    add(stats.allocation[kAll], live >= 0 ? 1 : -1);
  }
  void reserve(int64_t n) {
    taken += n;
    n >= 0 ? stats.reserved_bytes[kAll].increase(n) : stats.reserved_bytes[kAll].decrease(-n);
    n >= 0 ? stats.segment[kAll].increase(1) : stats.segment[kAll].decrease(1);
    n >= 0 ? ++stats.num_device_alloc : ++stats.num_device_free;
  }
  static char* host(size_t n) {
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 512, n) == 0, "the host itself is out of memory");
    return static_cast<char*>(p);
  }

  void* allocate(size_t n, int device) {
    if (n == 0) return nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    ++allocations;
    if (fail_in >= 0 && fail_in-- == 0) fail(n, device, "(asked for) ");
    return caching ? cached(n, device) : exact(n, device);
  }
  [[noreturn]] void fail(size_t n, int device, const char* why) {
    ++ooms;
    ++stats.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "SIM out of memory. ", why, "Tried to allocate ", n,
                     " bytes. sim:", device, " has a total capacity of ", limit, " bytes of which ",
                     limit - std::min(limit, taken), " are free; ", stats.allocated_bytes[kAll].current,
                     " are allocated by PyTorch.");
    abort();
  }
  void* exact(size_t n, int device) {
    if (n > limit || taken > limit - n) fail(n, device, "");
    void* p = host(n);
    plain[p] = n;
    reserve(n);
    count(n, n);
    return p;
  }
  void* cached(size_t asked, int device) {
    const size_t n = up(asked, kBlock);
    const bool small = n <= kSmall;
    auto& pool = small ? free_small : free_large;
    auto found = pool.lower_bound({n, nullptr});
    if (found == pool.end()) {
      const size_t size = small ? kSmallSegment : n < kMinLarge ? kLargeSegment : up(n, kSmallSegment);
      if (size > limit || taken > limit - size) {
        ++retries;
        ++stats.num_alloc_retries;
        release_cached();
        if (size > limit || taken > limit - size) fail(asked, device, "");
      }
      char* p = host(size);
      segments[p] = size;
      reserve(size);
      blocks[p] = {p, size, 0, false, p, small};
      found = pool.insert({size, p}).first;
    }
    char* p = found->second;
    pool.erase(found);
    Block& block = blocks[p];
    const size_t rest = block.size - n;
    if (small ? rest >= kBlock : rest > kSmall) {
      blocks[p + n] = {p + n, rest, 0, false, block.segment, small};
      pool.insert({rest, p + n});
      block.size = n;
    }
    block.used = true;
    block.asked = asked;
    count(block.size, asked);
    return p;
  }
  bool owns(void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    return plain.count(p) || blocks.count(static_cast<char*>(p));
  }
  /// The bytes of an allocation; 0 if it is not one of this device.
  size_t size_of(void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto it = plain.find(p); it != plain.end()) return it->second;
    auto it = blocks.find(static_cast<char*>(p));
    return it == blocks.end() ? 0 : it->second.size;
  }
  bool free(void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    if (auto it = plain.find(p); it != plain.end()) {
      reserve(-static_cast<int64_t>(it->second));
      count(-static_cast<int64_t>(it->second), -static_cast<int64_t>(it->second));
      plain.erase(it);
      ::free(p);
      return true;
    }
    auto it = blocks.find(static_cast<char*>(p));
    if (it == blocks.end()) return false;
    count(-static_cast<int64_t>(it->second.size), -static_cast<int64_t>(it->second.asked));
    it->second.used = false;
    auto& pool = it->second.small ? free_small : free_large;
    if (auto next = std::next(it);
        next != blocks.end() && !next->second.used && next->second.segment == it->second.segment) {
      pool.erase({next->second.size, next->first});
      it->second.size += next->second.size;
      blocks.erase(next);
    }
    if (it != blocks.begin()) {
      auto before = std::prev(it);
      if (!before->second.used && before->second.segment == it->second.segment) {
        pool.erase({before->second.size, before->first});
        before->second.size += it->second.size;
        blocks.erase(it);
        it = before;
      }
    }
    pool.insert({it->second.size, it->first});
    return true;
  }
  void release_cached() {
    for (auto it = segments.begin(); it != segments.end();) {
      Block& block = blocks[it->first];
      if (!block.used && block.size == it->second) {
        (block.small ? free_small : free_large).erase({block.size, block.at});
        blocks.erase(it->first);
        reserve(-static_cast<int64_t>(it->second));
        ::free(it->first);
        it = segments.erase(it);
      } else
        ++it;
    }
  }
};
int num_devices() {
  static const int n = [] {
    const char* s = getenv("SIM_DEVICES");
    return s ? atoi(s) : 1;
  }();
  return n;
}
Arena& arena(int index) {
  static auto* arenas = new std::vector<std::unique_ptr<Arena>>([] {
    std::vector<std::unique_ptr<Arena>> made;
    for (int i = 0; i < num_devices(); ++i) made.push_back(std::make_unique<Arena>());
    return made;
  }());
  TORCH_CHECK(index >= 0 && index < num_devices(), "invalid device ordinal sim:", index);
  return *(*arenas)[index];
}
thread_local int current = 0, inside = -1;  // `inside`: the device whose kernel runs in this thread.

}  // namespace sim
