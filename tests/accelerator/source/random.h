// Random numbers of a device: by default those of a CPU generator, so that numbers can be compared with the CPU's; with
// `counted` a generator is a seed and an offset, as CUDA's are, and what a call draws depends on how much it draws.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include "allocators.h"

namespace sim {

bool counted = false;

/// One number from three, well mixed.
uint64_t mixed(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t h = a * 0x9e3779b97f4a7c15ull + b * 0xbf58476d1ce4e5b9ull + c * 0x94d049bb133111ebull;
  h ^= h >> 31;
  h *= 0xd6e8feb86659fd93ull;
  return h ^ (h >> 32);
}

struct SimGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  uint64_t seed_now, offset_now = 0;

  explicit SimGenerator(DeviceIndex i, at::Generator g = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(kSim, i), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(g)),
        seed_now(inner.current_seed()) {}
  void set_current_seed(uint64_t s) override {
    inner.set_current_seed(s);
    seed_now = s;
    offset_now = 0;
  }
  void set_offset(uint64_t n) override { offset_now = n; }
  uint64_t get_offset() const override { return offset_now; }
  uint64_t current_seed() const override { return inner_seed(); }
  uint64_t inner_seed() const { return counted ? seed_now : inner.current_seed(); }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_now;
  }
  /// Before a call draws so many numbers: what it gets depends on the seed, the offset and their number.
  void begin_draw(int64_t count) {
    if (!counted) return;
    inner.set_current_seed(mixed(seed_now, offset_now, count));
    offset_now += 4 * ((count + 1023) / 1024);
  }
  /// The seed and the offset of a kernel that draws so many numbers by itself.
  std::pair<uint64_t, uint64_t> hand_out(int64_t count) {
    if (!counted) return {at::check_generator<at::CPUGeneratorImpl>(inner)->random64() >> 1, 0};
    const auto before = offset_now;
    offset_now += 4 * ((count + 1023) / 1024);
    return {seed_now >> 1, before};
  }
  void set_state(const c10::TensorImpl& s) override {
    if (!counted) return inner.unsafeGetGeneratorImpl()->set_state(s);
    const auto* words = static_cast<const uint64_t*>(s.data());
    seed_now = words[0];
    offset_now = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    if (!counted) return inner.unsafeGetGeneratorImpl()->get_state();
    at::Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* words = reinterpret_cast<uint64_t*>(state.data_ptr<uint8_t>());
    words[0] = seed_now;
    words[1] = offset_now;
    return state.getIntrusivePtr();
  }
  SimGenerator* clone_impl() const override {
    auto* made = new SimGenerator(device().index(), inner.clone());
    made->seed_now = seed_now;
    made->offset_now = offset_now;
    return made;
  }
};

const at::Generator& default_generator(DeviceIndex i) {
  static auto* all = new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (int d = 0; d < num_devices(); ++d) made.push_back(at::make_generator<SimGenerator>(d));
    return made;
  }());
  return (*all)[i < 0 ? current : i];
}

SimGenerator& own_of(const at::Generator& g) {
  auto* found = dynamic_cast<SimGenerator*>(g.unsafeGetGeneratorImpl());
  TORCH_CHECK(found, "Expected a 'sim' device type for generator but found '", g.device().type(), "'");
  return *found;
}

/// Kernels that take no generator draw from the CPU's default one: lend it the device's state while they run.
struct Lent {
  at::CPUGeneratorImpl *cpu, *own;
  c10::intrusive_ptr<c10::TensorImpl> saved;

  explicit Lent(int device)
      : cpu(at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator())),
        own(at::check_generator<at::CPUGeneratorImpl>(own_of(default_generator(device)).inner)) {
    Inside host(-1);  // States are the host's memory.
    saved = cpu->get_state();
    cpu->set_state(*own->get_state());
  }
  ~Lent() {
    Inside host(-1);
    own->set_state(*cpu->get_state());
    cpu->set_state(*saved);
  }
};

}  // namespace sim
