// What torch asks of a device: guards, hooks, generators; and the controls that tests have.
#include "device.h"

#include "memory.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <pthread.h>

#include <map>
#include <mutex>
#include <vector>

namespace sim {
namespace {

std::atomic<bool> initialized{false};
std::atomic<bool> forked{false};
std::atomic<bool> ended{false};

c10::DeviceIndex count_devices() {
  const char* visible = getenv("SIM_VISIBLE_DEVICES");
  if (visible == nullptr) {
    return 2;
  }
  std::string listed(visible);
  long commas = std::count(listed.begin(), listed.end(), ',');
  return listed.empty() ? 0 : static_cast<c10::DeviceIndex>(std::min<long>(commas + 1, kMaxDevices));
}

// A device's generator draws the very numbers that a CPU generator with the same seed draws. Numbers are drawn when
// an operation is enqueued, so that the state never depends on how late a stream is.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        drawing(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override {
    drawing.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return drawing.current_seed();
  }
  uint64_t seed() override {
    return drawing.seed();
  }
  void set_offset(uint64_t offset) override {
    drawing.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return drawing.get_offset();
  }
  void set_state(const c10::TensorImpl& state) override {
    drawing.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return drawing.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->drawing = drawing.clone();
    return copy;
  }

  at::Generator drawing;
};

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* found = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex index = 0; index < kMaxDevices; ++index) {
      made->push_back(at::make_generator<DeviceGenerator>(index));
    }
    return made;
  }();
  return found->at(device < 0 ? current_device() : device);
}

Moment& moment_of(void* event) {
  return *static_cast<Moment*>(event);
}

struct GuardImplementation final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  c10::Device getDevice() const override {
    return {kSim, current_device()};
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device former = getDevice();
    setDevice(device);
    return former;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(
        device.index() >= 0 && device.index() < device_count(), "there is no ", device, ": ", int(device_count()),
        " simulated devices are visible");
    set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {}; // every type
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return ask_for(now_in(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_synchronization("stream.synchronize");
    wait_for(stream);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    count_synchronization("device.synchronize");
    wait_for_all(device);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Moment();
    }
    moment_of(*event) = sim::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_in(stream, moment_of(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || ask_for(moment_of(event));
  }
  void synchronizeEvent(void* event) const override {
    count_synchronization("event.synchronize");
    if (event != nullptr) {
      wait_for(moment_of(event));
    }
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "an event between which time is measured was not reached yet");
    return *moment_of(second).time - *moment_of(first).time;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_on_stream(memory, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImplementation);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return initialized;
  }
  void init() const override {
    initialize();
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    GuardImplementation().setDevice({kSim, device});
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return GuardImplementation().exchangeDevice({kSim, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return keep_pinned(pointer) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    return {kSim, device_around(pointer)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

struct Registration {
  Registration() {
    c10::SetAllocator(kSim, device_allocator());
    at::setHostAllocator(kSim, pinned_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} registration;

std::mutex counting;
std::map<std::string, int64_t> synchronizations;
std::atomic<bool> synchronization_forbidden{false};

c10::Dict<std::string, int64_t> read_synchronizations() {
  std::lock_guard lock(counting);
  c10::Dict<std::string, int64_t> found;
  for (const auto& [reason, count] : synchronizations) {
    found.insert(reason, count);
  }
  return found;
}

void reset_synchronizations() {
  std::lock_guard lock(counting);
  synchronizations.clear();
}

void forbid_synchronization(bool forbidden) {
  synchronization_forbidden = forbidden;
}

void change_schedule(const std::string& name, double latency, int64_t seed) {
  set_schedule(name, latency, static_cast<uint64_t>(seed));
}

// The process must not use its devices any more; what it still frees is ignored.
void end() {
  if (initialized && !forked && !ended.exchange(true)) {
    end_streams();
  }
}

TORCH_LIBRARY(sim, library) {
  library.def("device_count() -> int", [] { return int64_t(device_count()); });
  library.def("is_initialized() -> bool", [] { return initialized.load(); });
  library.def("in_bad_fork() -> bool", [] { return forked.load(); });
  library.def("default_generator(int device) -> Generator?", [](int64_t device) -> std::optional<at::Generator> {
    return default_generator(static_cast<c10::DeviceIndex>(device));
  });
  library.def("synchronizations() -> Dict(str, int)", &read_synchronizations);
  library.def("reset_synchronizations() -> ()", &reset_synchronizations);
  library.def("forbid_synchronization(bool forbidden) -> ()", &forbid_synchronization);
  library.def("set_schedule(str name, float latency, int seed) -> ()", &change_schedule);
  library.def("end() -> ()", &end);
}

} // namespace

c10::DeviceIndex device_count() {
  static const c10::DeviceIndex found = count_devices();
  return found;
}

void initialize() {
  TORCH_CHECK(
      !forked, "Cannot re-initialize the simulated accelerator in a forked process: it was in use before the fork. ",
      "Start such processes with the 'spawn' method.");
  static std::once_flag once;
  std::call_once(once, [] {
    TORCH_CHECK(device_count() > 0, "SIM_VISIBLE_DEVICES hides every simulated accelerator");
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
      map_memory(device);
    }
    tell_of_stray_accesses();
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    initialized = true;
  });
}

bool is_alive() {
  return !forked && !ended;
}

void count_synchronization(const std::string& reason) {
  TORCH_CHECK(!synchronization_forbidden, "the program waits for the device (", reason, ") where that is forbidden");
  std::lock_guard lock(counting);
  ++synchronizations[reason];
}

at::Generator drawing_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  const at::Generator& chosen = given.has_value() && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(
      chosen.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
      chosen.device().type(), "'");
  return static_cast<DeviceGenerator*>(chosen.unsafeGetGeneratorImpl())->drawing;
}

} // namespace sim
