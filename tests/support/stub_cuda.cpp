// A CUDA device without CUDA, for torch's CPU build: what autograd, pinned memory and generators ask of a device.
//
// Nothing is computed on it: its tensors are fake ones (FakeTensorMode), and its streams and events are numbers.
// stub_cuda.py compiles and loads this file before torch asks for a CUDA device the first time.

#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

const Device kDevice(DeviceType::CUDA, 0);
thread_local StreamId current_stream = 0;
std::atomic<StreamId> streams{0};
std::atomic<int64_t> events{0};

struct StubGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(current_stream); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getNewStream(Device, int) const override { return stream(++streams); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(++streams); }
  Stream exchangeStream(Stream next) const override {
    const StreamId before = current_stream;
    current_stream = next.id();
    return stream(before);
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(++events);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  static Stream stream(StreamId id) { return Stream(Stream::UNSAFE, kDevice, id); }
};

std::mutex pinned_mutex;
std::set<const void*> pinned;

// Host memory of which it is known that this allocator returned it.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = std::malloc(nbytes ? nbytes : 1);
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.insert(memory);
    return {memory, memory, &release, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t count) const override {
    std::memcpy(target, source, count);
  }
  static void release(void* memory) {
    {
      const std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(memory);
    }
    std::free(memory);
  }
};

PinnedAllocator pinned_allocator;

// A generator that has a seed and draws nothing.
struct StubGenerator final : c10::GeneratorImpl {
  StubGenerator() : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t value) override { seed_ = value; }
  void set_offset(uint64_t value) override { offset_ = value; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { return seed_; }
  void set_state(const c10::TensorImpl& state) override {
    const auto* values = static_cast<const uint64_t*>(state.data());
    seed_ = values[0];
    offset_ = values[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* values = static_cast<uint64_t*>(state.mutable_data_ptr());
    values[0] = seed_;
    values[1] = offset_;
    return state.getIntrusivePtr();
  }
  StubGenerator* clone_impl() const override {
    auto* copy = new StubGenerator();
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = 0;
  uint64_t offset_ = 0;
};

struct StubHooks final : at::CUDAHooksInterface {
  explicit StubHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* memory) const override {
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    return pinned.count(memory) > 0;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static at::Generator made = at::make_generator<StubGenerator>();
    return made;
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<StubGenerator>(); }
};

StubGuard guard;
const c10::impl::DeviceGuardImplRegistrar registered_guard(DeviceType::CUDA, &guard);

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, StubHooks)
}  // namespace at
