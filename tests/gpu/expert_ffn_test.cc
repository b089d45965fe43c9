#include "tests/gpu/expert_ffn.h"

#include <cmath>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"

namespace expertmesh {
namespace {

// What gpu_bench holds a GPU to is held to the same kernels on the CPU here.
TEST(ExpertFfnTest, ErrorsAreSmallOnceItHasRunAndInfiniteBefore) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {
    ResetEmulatedCuda();
    const FfnPatterns patterns(dtype);
    {
      ExpertFfn ffn({dtype, 256, 128, {0, 3, 3, 8}}, patterns);
      EXPECT_EQ(ffn.num_experts(), 3);
      EXPECT_EQ(ffn.num_active_experts(), 2);
      EXPECT_TRUE(std::isinf(ffn.GateUpError()));
      EXPECT_TRUE(std::isinf(ffn.OutputError(false)));
      cudaStream_t stream = nullptr;
      ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      const double bound = dtype == DType::kBFloat16 ? 5e-3 : 5e-2;
      EXPECT_EQ(ffn.LaunchFfn(stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      EXPECT_LT(ffn.GateUpError(), 1e-6) << DTypeName(dtype);
      EXPECT_LT(ffn.OutputError(false), bound) << DTypeName(dtype);
      EXPECT_GT(ffn.OutputError(true), 0.5) << "weight rows taken in another order";
      if (dtype == DType::kFloat8E4M3) {
        EXPECT_EQ(ffn.LaunchFusedFfn(stream), cudaErrorInvalidValue);
      } else {
        EXPECT_EQ(ffn.LaunchFusedFfn(stream), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        EXPECT_LT(ffn.OutputError(true), bound);
        EXPECT_GT(ffn.OutputError(false), 0.5);
      }
      ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    }
  }
}

TEST(ExpertFfnTest, CountsOnTheDevice) {
  ResetEmulatedCuda();
  const FfnPatterns patterns(DType::kBFloat16);
  ExpertFfn ffn({DType::kBFloat16, 256, 128, {0, 4, 8, 12}}, patterns);
  ffn.UseDeviceCounts();
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(ffn.LaunchCounts(stream), cudaSuccess);
  EXPECT_EQ(ffn.LaunchFusedFfn(stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_LT(ffn.OutputError(true), 5e-3);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST(ExpertFfnTest, CountsOfWork) {
  ResetEmulatedCuda();
  const FfnPatterns patterns(DType::kBFloat16);
  const ExpertFfn ffn({DType::kBFloat16, 16, 8, {0, 2, 2}}, patterns);
  EXPECT_EQ(ffn.gate_up_flop(), 2 * 2 * 16 * 16);
  EXPECT_EQ(ffn.down_flop(), 2 * 2 * 8 * 16);
  EXPECT_EQ(ffn.gate_up_bytes(), 16 * 16 * 2 + 2 * (16 * 2 + 16 * 4));
  EXPECT_EQ(ffn.down_bytes(), 16 * 8 * 2 + 2 * (8 * 2 + 16 * 4));
}

}  // namespace
}  // namespace expertmesh
