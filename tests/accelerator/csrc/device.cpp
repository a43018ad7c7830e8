// Memory, streams, events, generators and pinned memory of the simulated accelerator.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

namespace sim {
namespace {

using c10::DeviceIndex;
using c10::StreamId;

constexpr int kMaxDevices = 8;
constexpr StreamId kStreams = 32; // per device; stream 0 is the default stream
constexpr size_t kCapacity = size_t(16) << 30; // address space per device; pages exist once they are touched
constexpr uint64_t kBacklog = 4096; // a stream that runs on demand never keeps more work than this
constexpr int kPoison = 0xFF; // not a number in every floating type, -1 in every integer type

// ---------------------------------------------------------------------------------------------- process

std::atomic<bool> initialized{false};
std::atomic<bool> forked{false};
std::atomic<bool> ended{false};

DeviceIndex count_devices() {
  const char* visible = getenv("SIM_VISIBLE_DEVICES");
  if (visible == nullptr) {
    return 2;
  }
  std::string listed(visible);
  auto commas = std::count(listed.begin(), listed.end(), ',');
  return listed.empty() ? 0 : static_cast<DeviceIndex>(std::min<long>(commas + 1, kMaxDevices));
}

DeviceIndex device_count() {
  static const DeviceIndex found = count_devices();
  return found;
}

void check_usable() {
  TORCH_CHECK(
      !forked.load(),
      "Cannot re-initialize the simulated accelerator in a forked process: it was in use before the fork. ",
      "Start such processes with the 'spawn' method.");
}

// ---------------------------------------------------------------------------------------------- streams

struct Task {
  std::string name;
  std::function<void()> work;
};

struct Schedule {
  std::atomic<bool> on_demand{true};
  std::atomic<double> latency{0.0};
  std::atomic<uint64_t> seed{0};
};
Schedule schedule;

// One stream: a queue of work and the thread that does it.
class Queue {
 public:
  explicit Queue(c10::Stream stream) : stream_(stream) {}

  uint64_t push(Task task) {
    std::lock_guard lock(mutex_);
    if (ended) {
      return done_;
    }
    if (!thread_.joinable()) {
      random_.seed(schedule.seed + 1009 * stream_.id() + stream_.device_index());
      thread_ = std::thread([this] { run(); });
    }
    tasks_.push_back(std::move(task));
    ++given_;
    if (given_ - done_ > kBacklog) {
      demanded_ = std::max(demanded_, given_ - kBacklog / 2);
    }
    changed_.notify_all();
    return given_;
  }

  uint64_t given() {
    std::lock_guard lock(mutex_);
    return given_;
  }

  // Whether the work up to a number is done; asking is a demand, so that polling makes progress.
  bool is_done(uint64_t number) {
    std::lock_guard lock(mutex_);
    demand(number);
    return done_ >= number;
  }

  bool has_done(uint64_t number) {
    std::lock_guard lock(mutex_);
    return done_ >= number;
  }

  void reach(uint64_t number) {
    std::unique_lock lock(mutex_);
    demand(number);
    changed_.wait(lock, [&] { return done_ >= number || ended; });
  }

  void raise_error() {
    std::string found;
    {
      std::lock_guard lock(mutex_);
      found.swap(error_);
    }
    TORCH_CHECK(found.empty(), found);
  }

  void wake() {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

  void join() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  void demand(uint64_t number) {
    if (number > demanded_) {
      demanded_ = number;
      changed_.notify_all();
    }
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] {
        return ended || (!tasks_.empty() && (!schedule.on_demand || demanded_ > done_));
      });
      if (ended) {
        return;
      }
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      stall();
      std::string error = attempt(task);
      task.work = nullptr;
      lock.lock();
      if (error_.empty()) {
        error_ = std::move(error);
      }
      ++done_;
      changed_.notify_all();
    }
  }

  // One piece of work in sixteen starts late, by a random time around the latency.
  void stall() {
    if (!schedule.on_demand && schedule.latency > 0 && random_() % 16 == 0) {
      std::uniform_real_distribution<double> span(0, 2 * schedule.latency);
      std::this_thread::sleep_for(std::chrono::duration<double>(span(random_)));
    }
  }

  std::string attempt(Task& task) {
    try {
      task.work();
      return "";
    } catch (const c10::Error& error) {
      return message(task, error.what_without_backtrace());
    } catch (const std::exception& error) {
      return message(task, error.what());
    }
  }

  std::string message(const Task& task, const std::string& cause) {
    return c10::str(task.name, " failed on ", stream_, " after it was enqueued: ", cause);
  }

  c10::Stream stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t given_ = 0;
  uint64_t done_ = 0;
  uint64_t demanded_ = 0;
  std::string error_;
  std::mt19937_64 random_;
  std::thread thread_;
};

void initialize();

// All streams of all devices. Never destroyed: memory may be freed as late as when the process ends.
struct Queues {
  std::array<std::array<std::unique_ptr<Queue>, kStreams>, kMaxDevices> all;
  std::array<std::atomic<StreamId>, kMaxDevices> next{};
  Queues() {
    for (int device = 0; device < kMaxDevices; ++device) {
      for (StreamId id = 0; id < kStreams; ++id) {
        c10::Device place(kSim, static_cast<DeviceIndex>(device));
        all[device][id] = std::make_unique<Queue>(c10::Stream(c10::Stream::UNSAFE, place, id));
      }
    }
  }
};

Queues& queues() {
  static Queues* found = new Queues();
  return *found;
}

Queue& queue_of(c10::Stream stream) {
  initialize();
  TORCH_CHECK(stream.device_type() == kSim, stream, " is not a stream of the simulated accelerator");
  return *queues().all.at(stream.device_index()).at(stream.id());
}

template <typename F>
void for_each_queue(DeviceIndex device, F visit) {
  for (auto& queue : queues().all.at(device)) {
    visit(*queue);
  }
}

thread_local DeviceIndex current_device = 0;
thread_local std::array<StreamId, kMaxDevices> current_streams{};

c10::Stream new_stream(DeviceIndex device) {
  StreamId drawn = queues().next.at(device).fetch_add(1);
  c10::Device place(kSim, device);
  return c10::Stream(c10::Stream::UNSAFE, place, 1 + drawn % (kStreams - 1));
}

// A point in a stream's work.
struct Moment {
  Queue* queue = nullptr;
  uint64_t number = 0;
  std::shared_ptr<std::atomic<double>> time; // when it was reached; only events have one

  bool is_past() const {
    return queue == nullptr || queue->is_done(number);
  }
};

Moment now_in(c10::Stream stream) {
  Queue& queue = queue_of(stream);
  return {&queue, queue.given(), nullptr};
}

void wait_in(c10::Stream stream, const Moment& moment) {
  Queue& queue = queue_of(stream);
  if (moment.queue != nullptr && moment.queue != &queue) {
    queue.push({"a wait for an event", [moment] { moment.queue->reach(moment.number); }});
  }
}

// ---------------------------------------------------------------------------------------------- memory

struct Block {
  char* pointer; // as tensors carry it
  size_t size; // rounded up to its size class
  size_t requested;
  DeviceIndex device;
  StreamId stream; // the stream that it was allocated for, the only one that may use it again at once
  std::vector<c10::Stream> used_by; // other streams that were recorded
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;

template <typename F>
void update(c10::CachingAllocator::StatArray& stats, F change) {
  change(stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)]);
}

// One device's memory, mapped for kernels only, and an equal range of addresses without access that tensors carry.
class Heap {
 public:
  explicit Heap(DeviceIndex device) : device_(device) {
    addresses_ = map(PROT_NONE);
    memory_ = map(PROT_READ | PROT_WRITE);
  }

  bool contains(const void* pointer) const {
    return pointer >= addresses_ && pointer < addresses_ + kCapacity;
  }

  char* kernel_address(const void* pointer) const {
    return memory_ + (static_cast<const char*>(pointer) - addresses_);
  }

  size_t offset(const void* pointer) const {
    return static_cast<const char*>(pointer) - addresses_;
  }

  Block* allocate(size_t bytes, c10::Stream stream) {
    size_t size = size_class(bytes);
    std::lock_guard lock(mutex_);
    collect_pending();
    Block* block = take(size, stream);
    block->requested = bytes;
    update(stats_.allocation, [&](auto& stat) { stat.increase(1); });
    update(stats_.allocated_bytes, [&](auto& stat) { stat.increase(size); });
    update(stats_.active_bytes, [&](auto& stat) { stat.increase(size); });
    update(stats_.requested_bytes, [&](auto& stat) { stat.increase(bytes); });
    return block;
  }

  void free(Block* block) {
    std::lock_guard lock(mutex_);
    update(stats_.allocation, [&](auto& stat) { stat.decrease(1); });
    update(stats_.allocated_bytes, [&](auto& stat) { stat.decrease(block->size); });
    update(stats_.requested_bytes, [&](auto& stat) { stat.decrease(block->requested); });
    std::vector<Moment> uses;
    for (c10::Stream stream : block->used_by) {
      uses.push_back(now_in(stream));
    }
    block->used_by.clear();
    pending_.push_back({block, std::move(uses)});
    collect_pending();
  }

  void record(Block* block, c10::Stream stream) {
    std::lock_guard lock(mutex_);
    bool known = std::find(block->used_by.begin(), block->used_by.end(), stream) != block->used_by.end();
    if (!known && !(stream.device_index() == device_ && stream.id() == block->stream)) {
      block->used_by.push_back(stream);
    }
  }

  // Give the pages of free blocks back to the system; the blocks then belong to no stream.
  void release() {
    std::lock_guard lock(mutex_);
    collect_pending();
    for_each_queue(device_, [](Queue& queue) { queue.reach(queue.given()); });
    for (auto& [owner, blocks] : free_) {
      for (Block* block : blocks) {
        madvise(kernel_address(block->pointer), block->size, MADV_DONTNEED);
        update(stats_.reserved_bytes, [&](auto& stat) { stat.decrease(block->size); });
        unowned_[block->size].push_back(block);
      }
    }
    free_.clear();
  }

  Stats stats() {
    std::lock_guard lock(mutex_);
    return stats_;
  }

  void reset_peaks() {
    std::lock_guard lock(mutex_);
    for (auto* stats : all_stats()) {
      update(*stats, [](auto& stat) { stat.reset_peak(); });
    }
  }

  void reset_accumulated() {
    std::lock_guard lock(mutex_);
    for (auto* stats : all_stats()) {
      update(*stats, [](auto& stat) { stat.reset_accumulated(); });
    }
  }

 private:
  struct Pending {
    Block* block;
    std::vector<Moment> uses;
  };

  static char* map(int protection) {
    void* found = mmap(nullptr, kCapacity, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "no address space for simulated device memory: ", strerror(errno));
    madvise(found, kCapacity, MADV_DONTFORK);
    return static_cast<char*>(found);
  }

  // Four classes for each power of two, so that blocks fit again and at most a quarter is lost. Whole pages, so
  // that they can be given back.
  static size_t size_class(size_t bytes) {
    size_t power = 4096;
    while (power * 2 <= bytes) {
      power *= 2;
    }
    size_t step = std::max<size_t>(power / 4, 4096);
    return (bytes + step - 1) / step * step;
  }

  std::array<c10::CachingAllocator::StatArray*, 5> all_stats() {
    return {&stats_.allocation, &stats_.allocated_bytes, &stats_.active_bytes, &stats_.reserved_bytes,
            &stats_.requested_bytes};
  }

  Block* take(size_t size, c10::Stream stream) {
    auto& mine = free_[{stream.id(), size}];
    if (!mine.empty()) {
      Block* block = mine.back();
      mine.pop_back();
      return block;
    }
    Block* block = take_unowned(size);
    block->stream = stream.id();
    update(stats_.reserved_bytes, [&](auto& stat) { stat.increase(size); });
    poison(block);
    return block;
  }

  Block* take_unowned(size_t size) {
    auto& blocks = unowned_[size];
    if (!blocks.empty()) {
      Block* block = blocks.back();
      blocks.pop_back();
      return block;
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, next_ + size <= kCapacity, "sim:", int(device_), " is out of memory: ", size,
        " bytes were asked for, ", kCapacity - next_, " of ", kCapacity, " are left");
    Block* block = new Block{addresses_ + next_, size, 0, device_, 0, {}};
    next_ += size;
    return block;
  }

  // Blocks that no recorded stream uses any more become free. Their own stream may use them again at once: whatever it
  // does then comes after whatever it did before. To every other stream that still reads them, they are poison.
  void collect_pending() {
    auto in_use = [this](Pending& pending) {
      for (const Moment& use : pending.uses) {
        if (!use.queue->has_done(use.number)) {
          return true;
        }
      }
      Block* block = pending.block;
      poison(block);
      update(stats_.active_bytes, [&](auto& stat) { stat.decrease(block->size); });
      free_[{block->stream, block->size}].push_back(block);
      return false;
    };
    pending_.erase(
        std::stable_partition(pending_.begin(), pending_.end(), in_use), pending_.end());
  }

  void poison(Block* block) {
    char* start = kernel_address(block->pointer);
    size_t size = block->size;
    c10::Stream owner(c10::Stream::UNSAFE, c10::Device(kSim, device_), block->stream);
    queue_of(owner).push({"the poisoning of free memory", [start, size] { std::memset(start, kPoison, size); }});
  }

  DeviceIndex device_;
  char* addresses_;
  char* memory_;
  std::mutex mutex_;
  size_t next_ = 0;
  std::map<std::pair<StreamId, size_t>, std::vector<Block*>> free_;
  std::map<size_t, std::vector<Block*>> unowned_;
  std::vector<Pending> pending_;
  Stats stats_;
};

std::array<Heap*, kMaxDevices> heaps{};

Heap* heap_around(const void* pointer) {
  for (Heap* heap : heaps) {
    if (heap != nullptr && heap->contains(pointer)) {
      return heap;
    }
  }
  return nullptr;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!forked && !ended) { // a forked process has no device, and an ending one no streams
    heaps.at(block->device)->free(block);
  }
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    initialize();
    c10::Device place(kSim, current_device);
    if (bytes == 0) {
      return {nullptr, place};
    }
    Block* block = heaps.at(current_device)->allocate(bytes, current_stream(current_device));
    return {block->pointer, block, &free_block, place};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // the context of a block is not its address
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    char* to = static_cast<char*>(sim::kernel_address(target));
    char* from = static_cast<char*>(sim::kernel_address(source));
    enqueue(current_stream(current_device), "a copy of a storage", [=] { std::memcpy(to, from, bytes); });
  }

  bool initialized() override {
    return sim::initialized;
  }

  void emptyCache(c10::MempoolId_t) override {
    for (Heap* heap : heaps) {
      if (heap != nullptr) {
        heap->release();
      }
    }
  }

  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    record_on_stream(memory, stream);
  }

  Stats getDeviceStats(DeviceIndex device) override {
    initialize();
    return heaps.at(device)->stats();
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    initialize();
    heaps.at(device)->reset_accumulated();
  }

  void resetPeakStats(DeviceIndex device) override {
    initialize();
    heaps.at(device)->reset_peaks();
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    auto stats = getDeviceStats(device);
    return {kCapacity - stats.allocated_bytes[0].current, kCapacity};
  }
};

DeviceAllocator* device_allocator() {
  static auto* found = new DeviceAllocator();
  return found;
}

// ---------------------------------------------------------------------------------------------- stray accesses

struct sigaction former_action;

void append(char* text, size_t& length, const char* more) {
  while (*more != 0) {
    text[length++] = *more++;
  }
}

void append(char* text, size_t& length, size_t number) {
  char digits[24];
  size_t count = 0;
  do {
    digits[count++] = static_cast<char>('0' + number % 10);
    number /= 10;
  } while (number != 0);
  while (count != 0) {
    text[length++] = digits[--count];
  }
}

// Say which device memory was touched, then let the fault take its usual course: the instruction faults again.
void tell_of_fault(int, siginfo_t* info, void*) {
  for (int device = 0; device < kMaxDevices; ++device) {
    Heap* heap = heaps[device];
    if (heap != nullptr && heap->contains(info->si_addr)) {
      char text[200];
      size_t length = 0;
      append(text, length, "STRAY ACCESS: the CPU touched memory of sim:");
      append(text, length, static_cast<size_t>(device));
      append(text, length, " at offset ");
      append(text, length, heap->offset(info->si_addr));
      append(text, length, " outside of a kernel or copy\n");
      (void)!write(STDERR_FILENO, text, length);
    }
  }
  sigaction(SIGSEGV, &former_action, nullptr);
}

void initialize() {
  check_usable();
  static std::once_flag once;
  std::call_once(once, [] {
    TORCH_CHECK(device_count() > 0, "SIM_VISIBLE_DEVICES hides every simulated accelerator");
    queues();
    for (DeviceIndex device = 0; device < device_count(); ++device) {
      heaps[device] = new Heap(device);
    }
    struct sigaction action {};
    action.sa_sigaction = tell_of_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &former_action);
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    initialized = true;
  });
}

// ---------------------------------------------------------------------------------------------- pinned memory

struct PinnedBlock {
  explicit PinnedBlock(size_t bytes) : size(bytes), memory(static_cast<char*>(aligned_alloc(4096, rounded(bytes)))) {
    TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "no host memory for ", bytes, " pinned bytes");
  }
  ~PinnedBlock() {
    std::free(memory);
  }
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  static size_t rounded(size_t bytes) {
    return (bytes + 4095) / 4096 * 4096;
  }

  size_t size;
  char* memory;
};

// Pinned blocks by their start. A copy that is under way keeps its block, as torch's own host allocators do.
struct PinnedBlocks {
  std::mutex mutex;
  std::map<const char*, std::shared_ptr<PinnedBlock>> blocks;
  size_t bytes = 0;
};

PinnedBlocks& pinned() {
  static auto* found = new PinnedBlocks();
  return *found;
}

void unpin(void* memory) {
  std::shared_ptr<PinnedBlock> last; // destroyed after the lock is released
  std::lock_guard lock(pinned().mutex);
  auto found = pinned().blocks.find(static_cast<const char*>(memory));
  last = found->second;
  pinned().bytes -= last->size;
  pinned().blocks.erase(found);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device host(c10::DeviceType::CPU);
    if (bytes == 0) {
      return {nullptr, host};
    }
    auto block = std::make_shared<PinnedBlock>(bytes);
    std::lock_guard lock(pinned().mutex);
    pinned().blocks[block->memory] = block;
    pinned().bytes += bytes;
    return {block->memory, block->memory, &unpin, host};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  bool record_event(void* pointer, void*, c10::Stream stream) override {
    auto kept = keep_pinned(pointer);
    if (kept == nullptr) {
      return false;
    }
    enqueue(stream, "the use of pinned memory", [kept] {});
    return true;
  }

  void empty_cache() override {} // nothing is cached

  at::HostStats get_stats() override {
    std::lock_guard lock(pinned().mutex);
    at::HostStats stats;
    stats.active_requests.increase(pinned().blocks.size());
    stats.active_bytes.increase(pinned().bytes);
    return stats;
  }

  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator* pinned_allocator() {
  static auto* found = new PinnedAllocator();
  return found;
}

// ---------------------------------------------------------------------------------------------- generators

// A device's generator draws the very numbers that a CPU generator with the same seed draws. Numbers are drawn when
// an operation is enqueued, so that the state never depends on how late a stream is.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex device)
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

const at::Generator& default_generator(DeviceIndex device) {
  static auto* found = [] {
    auto* made = new std::vector<at::Generator>();
    for (DeviceIndex index = 0; index < kMaxDevices; ++index) {
      made->push_back(at::make_generator<DeviceGenerator>(index));
    }
    return made;
  }();
  return found->at(device < 0 ? current_device : device);
}

// ---------------------------------------------------------------------------------------------- torch's interfaces

Moment* moment_of(void* event) {
  return static_cast<Moment*>(event);
}

struct GuardImplementation final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device former = getDevice();
    setDevice(device);
    return former;
  }
  c10::Device getDevice() const override {
    return {kSim, current_device};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(
        device.index() >= 0 && device.index() < device_count(), "there is no ", device, ": ", int(device_count()),
        " simulated devices are visible");
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
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
    return new_stream(device.has_index() ? device.index() : current_device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream former = current_stream(stream.device_index());
    current_streams.at(stream.device_index()) = stream.id();
    return former;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return now_in(stream).is_past();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_synchronization("stream.synchronize");
    wait_for(stream);
  }
  void synchronizeDevice(DeviceIndex device) const override {
    initialize();
    count_synchronization("device.synchronize");
    for_each_queue(device, [](Queue& queue) { queue.reach(queue.given()); });
    for_each_queue(device, [](Queue& queue) { queue.raise_error(); });
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &queue_of(stream);
  }

  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Moment();
    }
    Queue& queue = queue_of(stream);
    auto time = std::make_shared<std::atomic<double>>(0);
    uint64_t number = queue.push({"an event", [time] {
      auto since = std::chrono::steady_clock::now().time_since_epoch();
      *time = std::chrono::duration<double, std::milli>(since).count();
    }});
    *moment_of(*event) = {&queue, number, time};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_in(stream, *moment_of(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || moment_of(event)->is_past();
  }
  void synchronizeEvent(void* event) const override {
    check_usable();
    count_synchronization("event.synchronize");
    if (event != nullptr && moment_of(event)->queue != nullptr) {
      moment_of(event)->queue->reach(moment_of(event)->number);
      moment_of(event)->queue->raise_error();
    }
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "an event between which time is measured was not reached yet");
    return *moment_of(second)->time - *moment_of(first)->time;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete moment_of(event);
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
  bool hasPrimaryContext(DeviceIndex) const override {
    return initialized;
  }
  void init() const override {
    initialize();
  }
  DeviceIndex deviceCount() const override {
    return device_count();
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    GuardImplementation().setDevice({kSim, device});
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return GuardImplementation().exchangeDevice({kSim, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return keep_pinned(pointer) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    for (DeviceIndex device = 0; device < device_count(); ++device) {
      if (heaps[device] != nullptr && heaps[device]->contains(pointer)) {
        return {kSim, device};
      }
    }
    TORCH_CHECK(false, "the address belongs to no simulated device");
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? current_device : device);
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

// ---------------------------------------------------------------------------------------------- control

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

void set_schedule(bool on_demand, double latency, int64_t seed) {
  schedule.latency = latency;
  schedule.seed = static_cast<uint64_t>(seed);
  schedule.on_demand = on_demand;
  for (auto& device : queues().all) {
    for (auto& queue : device) {
      queue->wake();
    }
  }
}

// End the streams' threads; work that nobody waited for is dropped. The process must not use the device any more.
void end() {
  if (initialized && !forked && !ended.exchange(true)) {
    for (auto& device : queues().all) {
      for (auto& queue : device) {
        queue->wake();
      }
    }
    for (auto& device : queues().all) {
      for (auto& queue : device) {
        queue->join();
      }
    }
  }
}

TORCH_LIBRARY(sim, library) {
  library.def("synchronizations() -> Dict(str, int)", &read_synchronizations);
  library.def("reset_synchronizations() -> ()", &reset_synchronizations);
  library.def("forbid_synchronization(bool forbidden) -> ()", [](bool forbidden) { synchronization_forbidden = forbidden; });
  library.def("set_schedule(bool on_demand, float latency, int seed) -> ()", &set_schedule);
  library.def("default_generator(int device) -> Generator?", [](int64_t device) -> std::optional<at::Generator> {
    return default_generator(static_cast<DeviceIndex>(device));
  });
  library.def("device_count() -> int", [] { return int64_t(device_count()); });
  library.def("in_bad_fork() -> bool", [] { return forked.load(); });
  library.def("is_initialized() -> bool", [] { return initialized.load(); });
  library.def("end() -> ()", &end);
}

} // namespace

// ---------------------------------------------------------------------------------------------- for the kernels

void* kernel_address(const void* device_pointer) {
  if (device_pointer == nullptr) {
    return nullptr;
  }
  Heap* heap = heap_around(device_pointer);
  TORCH_CHECK(heap != nullptr, "a tensor of the simulated accelerator carries an address of none of its devices");
  return heap->kernel_address(device_pointer);
}

std::shared_ptr<void> keep_pinned(const void* host_pointer) {
  auto* address = static_cast<const char*>(host_pointer);
  std::lock_guard lock(pinned().mutex);
  auto after = pinned().blocks.upper_bound(address);
  if (after == pinned().blocks.begin()) {
    return nullptr;
  }
  auto block = std::prev(after)->second;
  return address < block->memory + block->size ? block : nullptr;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  DeviceIndex device = storage.device().index();
  DeviceIndex former = std::exchange(current_device, device);
  c10::DataPtr memory = device_allocator()->allocate(bytes);
  current_device = former;
  c10::Stream stream = current_stream(device);
  if (size_t kept = std::min(bytes, storage.nbytes()); kept > 0) {
    char* to = static_cast<char*>(kernel_address(memory.get()));
    char* from = static_cast<char*>(kernel_address(storage.data()));
    record_on_stream(storage.data_ptr(), stream);
    enqueue(stream, "the resizing of a storage", [=] { std::memcpy(to, from, kept); });
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

c10::Stream current_stream(DeviceIndex device) {
  DeviceIndex index = device < 0 ? current_device : device;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, index), current_streams.at(index));
}

void enqueue(c10::Stream stream, std::string name, std::function<void()> work) {
  queue_of(stream).push({std::move(name), std::move(work)});
}

void order(c10::Stream earlier, c10::Stream later) {
  wait_in(later, now_in(earlier));
}

void wait_for(c10::Stream stream) {
  Queue& queue = queue_of(stream);
  queue.reach(queue.given());
  queue.raise_error();
}

void count_synchronization(const std::string& reason) {
  TORCH_CHECK(!synchronization_forbidden, "the program waits for the device (", reason, ") where that is forbidden");
  std::lock_guard lock(counting);
  ++synchronizations[reason];
}

void record_on_stream(const c10::DataPtr& memory, c10::Stream stream) {
  if (memory.get() != nullptr && memory.get_deleter() == &free_block) {
    check_usable();
    auto* block = static_cast<Block*>(memory.get_context());
    heaps.at(block->device)->record(block, stream);
  }
}

at::Generator drawing_generator(const std::optional<at::Generator>& given, DeviceIndex device) {
  const at::Generator& chosen = given.has_value() && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(
      chosen.device().type() == kSim, "Expected a 'sim' device type for generator but found '", chosen.device().type(), "'");
  return static_cast<DeviceGenerator*>(chosen.unsafeGetGeneratorImpl())->drawing;
}

} // namespace sim
