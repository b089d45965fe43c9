#include "kernels/cuda/write_counts.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/device_bytes.h"

namespace expertmesh {
namespace {

TEST(WriteCountsTest, AsManyLaunchesAsParametersNeed) {
  for (const int32_t count : {0, 1, 127, 128, 129, 999, 1000, 1001, 2500}) {
    std::vector<int32_t> expected(static_cast<size_t>(count));
    std::iota(expected.begin(), expected.end(), 7);
    const DeviceBytes output = RunRepeatedly(count * 4, 0, [&](std::byte* out) {
      // The host's counts need not outlive the call.
      std::vector<int32_t> counts = expected;
      const cudaError_t error =
          LaunchWriteCounts(counts.data(), count, reinterpret_cast<int32_t*>(out), nullptr);
      std::fill(counts.begin(), counts.end(), -1);
      return error;
    });
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), output.As<int32_t>())) << count;
  }
}

}  // namespace
}  // namespace expertmesh
