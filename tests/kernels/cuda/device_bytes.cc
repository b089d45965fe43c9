#include "tests/kernels/cuda/device_bytes.h"

#include <algorithm>

#include "gtest/gtest.h"
#include "kernels/base/address_sanitizer.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {
namespace {

constexpr std::byte kPoison{0xff};
constexpr std::byte kGuard{0xa5};
constexpr int64_t kGuardBytes = 64;

}  // namespace

DeviceBytes::DeviceBytes(int64_t size_bytes, int64_t misalignment)
    : memory_(AllocateOnTestDevice(2 * kGuardBytes + misalignment + size_bytes)),
      data_(memory_.get() + kGuardBytes + misalignment),
      size_bytes_(size_bytes) {
  std::fill(memory_.get(), data_ + size_bytes_ + kGuardBytes, kGuard);
  std::fill_n(data_, size_bytes, kPoison);
  ForbidAccess(memory_.get(), kGuardBytes);
  ForbidAccess(data_ + size_bytes_, kGuardBytes);
}

DeviceBytes::DeviceBytes(const std::vector<std::byte>& bytes, int64_t misalignment)
    : DeviceBytes(static_cast<int64_t>(bytes.size()), misalignment) {
  std::copy(bytes.begin(), bytes.end(), data_);
}

void DeviceBytes::FreeMemory::operator()(std::byte* memory) const { FreeOnTestDevice(memory); }

bool DeviceBytes::IsPoison(int64_t offset, int64_t count) const {
  return std::all_of(data_ + offset, data_ + offset + count,
                     [](std::byte b) { return b == kPoison; });
}

void DeviceBytes::ExpectGuardsIntact() const {
  AllowAccess(memory_.get(), kGuardBytes);
  AllowAccess(data_ + size_bytes_, kGuardBytes);
  const auto is_guard = [](std::byte b) { return b == kGuard; };
  const std::byte* end = data_ + size_bytes_;
  EXPECT_TRUE(std::all_of<const std::byte*>(memory_.get(), data_, is_guard))
      << "written before the output";
  EXPECT_TRUE(std::all_of(end, end + kGuardBytes, is_guard)) << "written behind the output";
  ForbidAccess(memory_.get(), kGuardBytes);
  ForbidAccess(data_ + size_bytes_, kGuardBytes);
}

DeviceBytes RunRepeatedly(int64_t output_bytes, int64_t misalignment,
                          const std::function<cudaError_t(std::byte* output)>& launch) {
  std::vector<DeviceBytes> outputs;
  for (int run = 0; run < kTestDeviceRuns; ++run) {
    outputs.emplace_back(output_bytes, misalignment);
    BeginRun(run);
    EXPECT_EQ(launch(outputs.back().data()), cudaSuccess);
    EXPECT_EQ(EndRun(), cudaSuccess);
    outputs.back().ExpectGuardsIntact();
    EXPECT_EQ(outputs.back().bytes(), outputs.front().bytes()) << "run " << run;
  }
  return std::move(outputs.front());
}

}  // namespace expertmesh
