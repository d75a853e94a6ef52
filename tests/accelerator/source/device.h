// Devices, streams and events as PyTorch asks for them.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "copies.h"

namespace sim {

struct Event {
  std::chrono::steady_clock::time_point at;
  Clock after;
};
StreamKey key_of(const c10::Stream& s) { return {s.device_index(), s.id()}; }
std::atomic<c10::StreamId> next_stream{1};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device d) const override {
    Device old(kSim, current);
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(kSim, current); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < num_devices(), "invalid device ordinal");
    if (d.has_index()) current = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.has_index()) current = d.index();
  }
  static Device full(Device d) { return Device(kSim, d.has_index() ? d.index() : static_cast<DeviceIndex>(current)); }
  c10::Stream getStream(Device d) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, full(d), current_stream[full(d).index()]);
  }
  c10::Stream getDefaultStream(Device d) const override { return c10::Stream(c10::Stream::UNSAFE, full(d), 0); }
  c10::Stream getNewStream(Device d, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, full(d), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    auto old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  void destroyEvent(void* e, DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const c10::Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (*e == nullptr) *e = new Event;
    *static_cast<Event*>(*e) = {std::chrono::steady_clock::now(), clock_of(key_of(s))};
  }
  void block(void* e, const c10::Stream& s) const override {
    if (e != nullptr) put_behind(key_of(s), static_cast<Event*>(e)->after);
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& s) const override { wait(clock_of(key_of(s))); }
  void synchronizeEvent(void* e) const override {
    if (e != nullptr) wait(static_cast<Event*>(e)->after);
  }
  void synchronizeDevice(DeviceIndex) const override { wait(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    record_use(data.get(), key_of(s));
  }
  double elapsedTime(void* a, void* b, DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(b)->at - static_cast<Event*>(a)->at).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices(); }
  void setCurrentDevice(DeviceIndex i) const override { Guard().setDevice(Device(kSim, i)); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    auto old = current;
    current = i;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return i < 0 ? current : exchangeDevice(i); }
  bool isPinnedPtr(const void* p) const override { return Pinned::has(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  Device getDeviceFromPtr(void* p) const override {
    for (int i = 0; i < num_devices(); ++i)
      if (arena(i).owns(p)) return Device(kSim, i);
    TORCH_CHECK(false, "not memory of a sim device");
  }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override {
    return at::make_generator<SimGenerator>(i < 0 ? current : i);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto data = sim_allocator.allocate(n);
    if (n && impl->nbytes()) std::memcpy(data.get(), impl->data(), std::min(n, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(n);
  }
};

}  // namespace sim
