#include "streams.h"

#include "device.h"

#include <c10/util/Exception.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace sim {
namespace {

constexpr c10::StreamId kStreams = 32; // per device; stream 0 is the default stream
constexpr uint64_t kBacklog = 4096; // a stream that works on demand keeps no more work than this

enum Schedule { ON_DEMAND, SIDE_STREAMS_FIRST, DEFAULT_STREAM_FIRST, JITTERED };

const std::map<std::string, Schedule> schedules{
    {"on demand", ON_DEMAND},
    {"side streams first", SIDE_STREAMS_FIRST},
    {"default stream first", DEFAULT_STREAM_FIRST},
    {"jittered", JITTERED},
};

std::atomic<Schedule> schedule{ON_DEMAND};
std::atomic<double> latency{0};
std::atomic<bool> ended{false};

struct Task {
  std::string name;
  std::function<void()> work;
};

} // namespace

class Queue {
 public:
  explicit Queue(c10::Stream stream) : stream_(stream) {}

  uint64_t push(Task task) {
    std::lock_guard lock(mutex_);
    if (ended) {
      return done_;
    }
    if (!thread_.joinable()) {
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

  bool has_done(uint64_t number) {
    std::lock_guard lock(mutex_);
    return done_ >= number;
  }

  void demand(uint64_t number) {
    std::lock_guard lock(mutex_);
    if (number > demanded_) {
      demanded_ = number;
      changed_.notify_all();
    }
  }

  void reach(uint64_t number) {
    demand(number);
    std::unique_lock lock(mutex_);
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

  void seed(uint64_t seed) {
    std::lock_guard lock(mutex_);
    random_.seed(seed + 1009 * static_cast<uint64_t>(stream_.id()) + static_cast<uint64_t>(stream_.device_index()));
    changed_.notify_all();
  }

  void join() {
    {
      std::lock_guard lock(mutex_);
      changed_.notify_all();
    }
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ended || (!tasks_.empty() && (schedule == JITTERED || demanded_ > done_)); });
      if (ended) {
        return;
      }
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      std::chrono::duration<double> pause(draw_pause());
      lock.unlock();
      std::this_thread::sleep_for(pause);
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
  double draw_pause() {
    if (schedule != JITTERED || random_() % 16 != 0) {
      return 0;
    }
    return std::uniform_real_distribution<double>(0, 2 * latency)(random_);
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
  uint64_t given_ = 0; // the number of the newest piece of work
  uint64_t done_ = 0;
  uint64_t demanded_ = 0;
  std::string error_;
  std::mt19937_64 random_;
  std::thread thread_;
};

namespace {

struct Queues {
  std::array<std::array<std::unique_ptr<Queue>, kStreams>, kMaxDevices> all;
  std::array<std::atomic<c10::StreamId>, kMaxDevices> next{};

  Queues() {
    for (int device = 0; device < kMaxDevices; ++device) {
      for (c10::StreamId id = 0; id < kStreams; ++id) {
        c10::Device place(kSim, static_cast<c10::DeviceIndex>(device));
        all[device][id] = std::make_unique<Queue>(c10::Stream(c10::Stream::UNSAFE, place, id));
      }
    }
  }

  template <typename F>
  void visit(F action) {
    for (auto& device : all) {
      for (auto& queue : device) {
        action(*queue);
      }
    }
  }
};

// Never destroyed: memory may be freed as late as at the end of the process.
Queues& queues() {
  static auto* found = new Queues();
  return *found;
}

Queue& queue_of(c10::Stream stream) {
  initialize();
  TORCH_CHECK(stream.device_type() == kSim, stream, " is not a stream of the simulated accelerator");
  return *queues().all.at(stream.device_index()).at(stream.id());
}

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> these_streams{};

} // namespace

c10::DeviceIndex current_device() {
  return this_device;
}

void set_current_device(c10::DeviceIndex device) {
  this_device = device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  c10::DeviceIndex index = device < 0 ? this_device : device;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, index), these_streams.at(index));
}

c10::Stream exchange_stream(c10::Stream stream) {
  c10::Stream former = current_stream(stream.device_index());
  these_streams.at(stream.device_index()) = stream.id();
  return former;
}

c10::Stream new_stream(c10::DeviceIndex device) {
  c10::StreamId drawn = queues().next.at(device).fetch_add(1);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), 1 + drawn % (kStreams - 1));
}

void enqueue(c10::Stream stream, std::string name, std::function<void()> work) {
  Queue& queue = queue_of(stream);
  uint64_t number = queue.push({std::move(name), std::move(work)});
  if (schedule == (stream.id() == 0 ? DEFAULT_STREAM_FIRST : SIDE_STREAMS_FIRST)) {
    queue.reach(number);
  }
}

Moment now_in(c10::Stream stream) {
  Queue& queue = queue_of(stream);
  return {&queue, queue.given(), nullptr};
}

Moment record(c10::Stream stream) {
  Queue& queue = queue_of(stream);
  auto time = std::make_shared<std::atomic<double>>(0);
  uint64_t number = queue.push({"an event", [time] {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    *time = std::chrono::duration<double, std::milli>(since).count();
  }});
  return {&queue, number, time};
}

void wait_in(c10::Stream stream, const Moment& moment) {
  Queue& queue = queue_of(stream);
  if (moment.queue != nullptr && moment.queue != &queue) {
    queue.push({"a wait for an event", [moment] { moment.queue->reach(moment.number); }});
  }
}

bool is_past(const Moment& moment) {
  return moment.queue == nullptr || moment.queue->has_done(moment.number);
}

bool ask_for(const Moment& moment) {
  if (moment.queue != nullptr) {
    moment.queue->demand(moment.number);
  }
  return is_past(moment);
}

void wait_for(const Moment& moment) {
  if (moment.queue != nullptr) {
    moment.queue->reach(moment.number);
    moment.queue->raise_error();
  }
}

void wait_for(c10::Stream stream) {
  wait_for(now_in(stream));
}

void wait_for_all(c10::DeviceIndex device) {
  initialize();
  auto& all = queues().all.at(device);
  for (auto& queue : all) {
    queue->reach(queue->given());
  }
  for (auto& queue : all) {
    queue->raise_error();
  }
}

void set_schedule(const std::string& name, double mean_latency, uint64_t seed) {
  auto found = schedules.find(name);
  TORCH_CHECK_VALUE(found != schedules.end(), "there is no schedule '", name, "'");
  latency = mean_latency;
  schedule = found->second;
  queues().visit([seed](Queue& queue) { queue.seed(seed); });
}

void end_streams() {
  if (!ended.exchange(true)) {
    queues().visit([](Queue& queue) { queue.join(); });
  }
}

} // namespace sim
