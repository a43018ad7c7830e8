// Memory of the simulated accelerator: of its devices, which the CPU cannot touch, and pinned memory of the host.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <memory>

namespace sim {

// Reserve a device's memory.
void map_memory(c10::DeviceIndex device);

// Let an access by the CPU say which device's memory it has touched before the process ends.
void tell_of_stray_accesses();

c10::DeviceAllocator* device_allocator();
at::HostAllocator* pinned_allocator();

// The address at which kernels reach device memory. The address that a tensor carries cannot be read or written.
void* kernel_address(const void* device_pointer);

c10::DeviceIndex device_around(const void* device_pointer);

// Keep the block of pinned host memory around an address until the result is destroyed; null for other memory.
std::shared_ptr<void> keep_pinned(const void* host_pointer);

// Let a storage have another size on its device; the old bytes move to the new memory in the current stream.
void resize_storage(const c10::Storage& storage, size_t bytes);

// Let memory not be used again before a stream has done what it has been given until the memory is freed.
void record_on_stream(const c10::DataPtr& memory, c10::Stream stream);

} // namespace sim
