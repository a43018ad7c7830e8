#include "memory.h"

#include "device.h"
#include "streams.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace sim {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kCapacity = size_t(16) << 30; // address space per device; pages exist once they are touched
constexpr int kPoison = 0xFF; // not a number in every floating type, -1 in every integer type

size_t rounded(size_t bytes, size_t step) {
  return (bytes + step - 1) / step * step;
}

struct Block {
  char* pointer; // as tensors carry it
  size_t size; // rounded up to its size class
  size_t requested;
  c10::DeviceIndex device;
  c10::StreamId stream; // the stream that it was allocated for, the only one that may use it again at once
  std::vector<c10::Stream> used_by; // other streams that were recorded
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingAllocator::StatArray;

c10::CachingAllocator::Stat& total(StatArray& stats) {
  return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

// One device's memory, mapped for kernels only, and an equal range of addresses without access that tensors carry.
class Heap {
 public:
  explicit Heap(c10::DeviceIndex device)
      : device_(device), addresses_(map(PROT_NONE)), memory_(map(PROT_READ | PROT_WRITE)) {}

  bool contains(const void* pointer) const {
    return pointer >= addresses_ && pointer < addresses_ + kCapacity;
  }

  size_t offset(const void* pointer) const {
    return static_cast<const char*>(pointer) - addresses_;
  }

  char* kernel_address(const void* pointer) const {
    return memory_ + offset(pointer);
  }

  Block* allocate(size_t bytes, c10::Stream stream) {
    size_t size = size_class(bytes);
    std::lock_guard lock(mutex_);
    collect_pending();
    Block* block = take(size, stream);
    block->requested = bytes;
    total(stats_.allocation).increase(1);
    total(stats_.allocated_bytes).increase(size);
    total(stats_.active_bytes).increase(size);
    total(stats_.requested_bytes).increase(bytes);
    return block;
  }

  void free(Block* block) {
    std::lock_guard lock(mutex_);
    total(stats_.allocation).decrease(1);
    total(stats_.allocated_bytes).decrease(block->size);
    total(stats_.requested_bytes).decrease(block->requested);
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
    auto& known = block->used_by;
    bool own = stream.device_index() == device_ && stream.id() == block->stream;
    if (!own && std::find(known.begin(), known.end(), stream) == known.end()) {
      known.push_back(stream);
    }
  }

  // Give the pages of free blocks back to the system; the blocks then belong to no stream.
  void release() {
    std::lock_guard lock(mutex_);
    wait_for_all(device_);
    collect_pending();
    wait_for_all(device_);
    for (auto& [owner, blocks] : free_) {
      for (Block* block : blocks) {
        madvise(kernel_address(block->pointer), block->size, MADV_DONTNEED);
        total(stats_.reserved_bytes).decrease(block->size);
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
    for (StatArray* stats : all_stats()) {
      total(*stats).reset_peak();
    }
  }

  void reset_accumulated() {
    std::lock_guard lock(mutex_);
    for (StatArray* stats : all_stats()) {
      total(*stats).reset_accumulated();
    }
  }

 private:
  struct Pending {
    Block* block;
    std::vector<Moment> uses;
  };

  // A forked process has no such memory: its accesses fault too.
  static char* map(int protection) {
    void* found = mmap(nullptr, kCapacity, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "no address space for simulated device memory: ", strerror(errno));
    madvise(found, kCapacity, MADV_DONTFORK);
    return static_cast<char*>(found);
  }

  // Four classes for each power of two, so that blocks fit again and at most a quarter is lost. Whole pages, so
  // that they can be given back.
  static size_t size_class(size_t bytes) {
    size_t power = kPage;
    while (power * 2 <= bytes) {
      power *= 2;
    }
    return rounded(bytes, std::max(power / 4, kPage));
  }

  std::array<StatArray*, 5> all_stats() {
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
    total(stats_.reserved_bytes).increase(size);
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
    auto* block = new Block{addresses_ + next_, size, 0, device_, 0, {}};
    next_ += size;
    return block;
  }

  // Blocks that no recorded stream uses any more become free. Their own stream may use them again at once: whatever it
  // does then comes after whatever it did before. To every other stream that still reads them, they are poison.
  void collect_pending() {
    auto is_used = [](const Pending& pending) {
      return !std::all_of(pending.uses.begin(), pending.uses.end(), is_past);
    };
    auto unused = std::stable_partition(pending_.begin(), pending_.end(), is_used);
    for (auto found = unused; found != pending_.end(); ++found) {
      Block* block = found->block;
      poison(block);
      total(stats_.active_bytes).decrease(block->size);
      free_[{block->stream, block->size}].push_back(block);
    }
    pending_.erase(unused, pending_.end());
  }

  void poison(Block* block) {
    char* start = kernel_address(block->pointer);
    size_t size = block->size;
    c10::Stream owner(c10::Stream::UNSAFE, c10::Device(kSim, device_), block->stream);
    enqueue(owner, "the poisoning of free memory", [start, size] { std::memset(start, kPoison, size); });
  }

  c10::DeviceIndex device_;
  char* addresses_;
  char* memory_;
  std::mutex mutex_;
  size_t next_ = 0;
  std::map<std::pair<c10::StreamId, size_t>, std::vector<Block*>> free_;
  std::map<size_t, std::vector<Block*>> unowned_;
  std::vector<Pending> pending_;
  Stats stats_;
};

std::array<Heap*, kMaxDevices> heaps{};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (is_alive()) {
    heaps.at(block->device)->free(block);
  }
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    initialize();
    c10::Device place(kSim, current_device());
    if (bytes == 0) {
      return {nullptr, place};
    }
    Block* block = heaps.at(place.index())->allocate(bytes, current_stream(place.index()));
    return {block->pointer, block, &free_block, place};
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    void* to = kernel_address(target);
    void* from = kernel_address(source);
    enqueue(current_stream(device_around(target)), "a copy of a storage", [=] { std::memcpy(to, from, bytes); });
  }

  bool initialized() override {
    return heaps[0] != nullptr;
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

  Stats getDeviceStats(c10::DeviceIndex device) override {
    initialize();
    return heaps.at(device)->stats();
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    initialize();
    heaps.at(device)->reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    initialize();
    heaps.at(device)->reset_peaks();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto stats = getDeviceStats(device);
    return {kCapacity - static_cast<size_t>(total(stats.allocated_bytes).current), kCapacity};
  }
};

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
  for (size_t device = 0; device < heaps.size(); ++device) {
    if (heaps[device] != nullptr && heaps[device]->contains(info->si_addr)) {
      char text[200];
      size_t length = 0;
      append(text, length, "STRAY ACCESS: the CPU touched memory of sim:");
      append(text, length, device);
      append(text, length, " at offset ");
      append(text, length, heaps[device]->offset(info->si_addr));
      append(text, length, " outside of a kernel or copy\n");
      (void)!write(STDERR_FILENO, text, length);
    }
  }
  sigaction(SIGSEGV, &former_action, nullptr);
}

struct PinnedBlock {
  explicit PinnedBlock(size_t bytes)
      : size(bytes), memory(static_cast<char*>(aligned_alloc(kPage, rounded(bytes, kPage)))) {
    TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "no host memory for ", bytes, " pinned bytes");
  }
  ~PinnedBlock() {
    std::free(memory);
  }
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

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

  void reset_accumulated_stats() override {} // nothing is accumulated
  void reset_peak_stats() override {}
};

} // namespace

void map_memory(c10::DeviceIndex device) {
  heaps.at(device) = new Heap(device);
}

void tell_of_stray_accesses() {
  struct sigaction action {};
  action.sa_sigaction = tell_of_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &former_action);
}

c10::DeviceAllocator* device_allocator() {
  static auto* found = new DeviceAllocator();
  return found;
}

at::HostAllocator* pinned_allocator() {
  static auto* found = new PinnedAllocator();
  return found;
}

c10::DeviceIndex device_around(const void* device_pointer) {
  for (size_t device = 0; device < heaps.size(); ++device) {
    if (heaps[device] != nullptr && heaps[device]->contains(device_pointer)) {
      return static_cast<c10::DeviceIndex>(device);
    }
  }
  TORCH_CHECK(false, "the address ", device_pointer, " belongs to no simulated device");
}

void* kernel_address(const void* device_pointer) {
  return device_pointer == nullptr ? nullptr : heaps.at(device_around(device_pointer))->kernel_address(device_pointer);
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
  c10::DeviceIndex device = storage.device().index();
  c10::DeviceIndex former = current_device();
  set_current_device(device);
  c10::DataPtr memory = device_allocator()->allocate(bytes);
  set_current_device(former);
  c10::Stream stream = current_stream(device);
  if (size_t kept = std::min(bytes, storage.nbytes()); kept > 0) {
    void* to = kernel_address(memory.get());
    void* from = kernel_address(storage.data());
    record_on_stream(storage.data_ptr(), stream);
    enqueue(stream, "the resizing of a storage", [=] { std::memcpy(to, from, kept); });
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

void record_on_stream(const c10::DataPtr& memory, c10::Stream stream) {
  if (memory.get() != nullptr && memory.get_deleter() == &free_block) {
    initialize();
    auto* block = static_cast<Block*>(memory.get_context());
    heaps.at(block->device)->record(block, stream);
  }
}

} // namespace sim
