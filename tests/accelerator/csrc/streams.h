// Streams of the simulated accelerator: queues of work, each with a thread that does the work later.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

namespace sim {

class Queue;

// A point in a stream's work; no point at all without a queue.
struct Moment {
  Queue* queue = nullptr;
  uint64_t number = 0;
  std::shared_ptr<std::atomic<double>> time; // in milliseconds, when it was reached; only recorded moments have one
};

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);

// Append work to a stream; `name` is for its error message.
void enqueue(c10::Stream stream, std::string name, std::function<void()> work);

// The end of what a stream has been given so far; `record` also notes when it is reached.
Moment now_in(c10::Stream stream);
Moment record(c10::Stream stream);

// Let everything that a stream is given from now on wait for a moment of another stream.
void wait_in(c10::Stream stream, const Moment& moment);

bool is_past(const Moment& moment);

// Whether a moment is past; asking makes a stream that works on demand go on, so that polling comes to an end.
bool ask_for(const Moment& moment);

// Block the caller until a moment is past, or everything that a stream or a device was given is done. Raise the first
// error of that stream's work.
void wait_for(const Moment& moment);
void wait_for(c10::Stream stream);
void wait_for_all(c10::DeviceIndex device);

// Say when streams work:
// - on demand: nothing is done before somebody waits or asks for it;
// - side streams first: work of streams other than the default stream is done when it is enqueued, the rest on demand;
// - default stream first: the same with the roles exchanged;
// - jittered: all work is done soon, with random stalls around the latency.
void set_schedule(const std::string& name, double latency, uint64_t seed);

// End the threads of all streams; work that nobody waited for is dropped.
void end_streams();

} // namespace sim
