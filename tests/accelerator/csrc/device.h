// The simulated accelerator: what its kernels may ask of its memory, its streams and its generators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <string>

namespace sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;

// The address at which kernels reach device memory. The address that a tensor carries cannot be read or written.
void* kernel_address(const void* device_pointer);

// Keep the block of pinned host memory around an address until the result is destroyed; null for other memory.
std::shared_ptr<void> keep_pinned(const void* host_pointer);

// Let a storage have another size on its device; the old bytes move to the new memory in the current stream.
void resize_storage(const c10::Storage& storage, size_t bytes);

c10::Stream current_stream(c10::DeviceIndex device);

// Append work to a stream. The stream's own thread does it, later; `name` is for its error message.
void enqueue(c10::Stream stream, std::string name, std::function<void()> work);

// Let everything that is appended to `later` from now on wait for everything that `earlier` has been given so far.
void order(c10::Stream earlier, c10::Stream later);

// Wait until a stream has done all of its work; raise the first error of that work.
void wait_for(c10::Stream stream);

// Count that the program waits for the device, by its reason; raise where that is forbidden.
void count_synchronization(const std::string& reason);

void record_on_stream(const c10::DataPtr& memory, c10::Stream stream);

// The CPU generator that draws the numbers of a device's generator (of its default generator when none is given).
at::Generator drawing_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device);

} // namespace sim
