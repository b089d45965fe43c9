#include "kernels/cuda/sigmoid_dot.h"

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_kernels.h"
#include "tests/kernels/cpu/random_layer.h"
#include "tests/kernels/cuda/device_bytes.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {
namespace {

// The bytes of every instruction set that has fused multiply-add; kPortable has not, and is near.
TEST(SigmoidDotTest, AsTheCpu) {
  ParallelFor parallel_for(ParallelForOptions{.num_threads = 1});
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t hidden_size : {1, 15, 16, 17, 33, 300, 2880}) {
      for (const double deviation : {0.1, 60.0}) {
        SCOPED_TRACE(std::string(DTypeName(dtype)) + " hidden " + std::to_string(hidden_size));
        std::mt19937_64 random(static_cast<uint64_t>(hidden_size));
        const int64_t num_rows = 19;
        const std::vector<std::byte> rows =
            ToBytes(RandomValues(random, num_rows * hidden_size, 1.0, dtype), dtype);
        const std::vector<double> wide =
            RandomValues(random, hidden_size, deviation, DType::kFloat32);
        const std::vector<float> vector(wide.begin(), wide.end());
        const DeviceBytes device_rows(rows, 0);
        const DeviceBytes device_vector = DeviceCopy(vector);
        CudaSigmoidDotParams params;
        params.rows = device_rows.data();
        params.rows_dtype = dtype;
        params.num_rows = num_rows;
        params.hidden_size = hidden_size;
        params.vector = device_vector.As<float>();
        const DeviceBytes output = RunRepeatedly(num_rows * 4, 0, [&](std::byte* out) {
          params.output = reinterpret_cast<float*>(out);
          return LaunchSigmoidDot(params, nullptr);
        });
        for (const CpuIsa isa : SupportedCpuIsas()) {
          const std::unique_ptr<RowOps> cpu = NewCpuRowOps(isa, &parallel_for).value();
          const std::unique_ptr<Stream> stream = NewInlineHostStream();
          DeviceBytes expected(num_rows * 4);
          ASSERT_TRUE(cpu->SigmoidDot({.rows = rows.data(),
                                       .rows_dtype = dtype,
                                       .num_rows = num_rows,
                                       .hidden_size = hidden_size,
                                       .vector = vector.data(),
                                       .output = expected.As<float>()},
                                      *stream)
                          .ok());
          if (isa != CpuIsa::kPortable) {
            EXPECT_EQ(output.bytes(), expected.bytes()) << CpuIsaName(isa);
            continue;
          }
          for (int64_t row = 0; row < num_rows; ++row) {
            const float near = expected.As<float>()[row];
            EXPECT_NEAR(output.As<float>()[row], near, 1e-3f * near + 1e-37f);
          }
        }
      }
    }
  }
}

TEST(SigmoidDotTest, ZeroRowsLaunchNothingAndMisfitsAreRefused) {
  const int64_t launches = NumLaunches();
  CudaSigmoidDotParams params;
  params.rows_dtype = DType::kFloat32;
  params.hidden_size = 1;
  EXPECT_EQ(LaunchSigmoidDot(params, nullptr), cudaSuccess);
  params.num_rows = 1;
  EXPECT_EQ(LaunchSigmoidDot(params, nullptr), cudaErrorInvalidValue);
  params.num_rows = -1;
  EXPECT_EQ(LaunchSigmoidDot(params, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(NumLaunches(), launches);
}

}  // namespace
}  // namespace expertmesh
