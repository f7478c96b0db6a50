// Devices, streams, events and generators, as c10 asks for them.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>
#include <chrono>
#include "memory.h"
#include "record.h"

namespace standin {

inline thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

struct EventState {
  int64_t nanoseconds = 0;
  uint64_t copies = 0;  // number of the last copy to the host before it
};

// Kernels are synchronous, so streams have an order by themselves: a missing wait between two of them is not seen.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override {
    check_device(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.has_index() ? device.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, index), current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return c10::Stream(c10::Stream::UNSAFE, device, ++last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for_device("stream"); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait_for_device("device"); }

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new EventState;
    *static_cast<EventState*>(*event) = {std::chrono::steady_clock::now().time_since_epoch().count(), PendingCopies::get().last()};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    if (event) PendingCopies::get().arrive(static_cast<EventState*>(event)->copies);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) PendingCopies::get().arrive(static_cast<EventState*>(event)->copies);
    tell("wait", "event");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<EventState*>(event); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return (static_cast<EventState*>(to)->nanoseconds - static_cast<EventState*>(from)->nanoseconds) / 1e6;
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// Numbers of a CPU's generator, drawn by one of the device's own.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device)
      : GeneratorImpl({kDevice, device}, c10::DispatchKeySet(c10::DispatchKey::CUDA)), numbers(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { numbers.set_current_seed(seed); }
  uint64_t current_seed() const override { return numbers.current_seed(); }
  uint64_t seed() override { return numbers.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { numbers.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return numbers.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->numbers = numbers.clone();
    return copy;
  }
  at::Generator numbers;
};

inline const at::Generator& default_generator(c10::DeviceIndex device = -1) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < kMostDevices; index++) made->push_back(at::make_generator<DeviceGenerator>(index));
    return made;
  }();
  if (device < 0) device = current_device;
  check_device(device);
  return (*all)[device];
}

inline at::Generator& numbers_of(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->numbers;
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  std::string showConfig() const override { return "stand-in"; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return standin::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return standin::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    check_device(device);
    standin::current_device = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = standin::current_device;
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(c10::DeviceIndex) const override { wait_for_device("device"); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  bool isPinnedPtr(const void* address) const override { return PinnedAllocator::get().holds(address); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, standin::current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device = -1) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device = -1) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? standin::current_device : device);
  }
};

}  // namespace standin
