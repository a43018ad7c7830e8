// The simulated accelerator as a whole: its devices, its generators, and the count of waits for it.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>

namespace sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;

c10::DeviceIndex device_count();

// Map the memory of every device, once. Raises in a process that was forked from one that had done so.
void initialize();

// Whether this process still has its devices: it is no fork of their owner, and it is not about to exit.
bool is_alive();

// Count that the program waits for the device, by reason; raise where that is forbidden.
void count_synchronization(const std::string& reason);

// The CPU generator that draws the numbers of a device's generator (of its default generator when none is given).
at::Generator drawing_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device);

} // namespace sim
