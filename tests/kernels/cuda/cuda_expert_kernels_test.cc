#include "kernels/cuda/cuda_expert_kernels.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/cpu/random_layer.h"
#include "tests/kernels/cuda/cuda_test_rank.h"
#include "tests/kernels/cuda/emulated_cuda_test.h"

namespace expertmesh {
namespace {

using testing::HasSubstr;

class CudaExpertKernelsTest : public EmulatedCudaTest {
 protected:
  CudaExpertKernelsTest() : EmulatedCudaTest({.memory_bytes = 64 << 20}) {}

  static ExpertLayerShape Shape(int64_t hidden_size, int64_t intermediate_size) {
    ExpertLayerShape shape;
    shape.num_local_experts = 3;
    shape.hidden_size = hidden_size;
    shape.intermediate_size = intermediate_size;
    shape.weight_dtype = DType::kBFloat16;
    return shape;
  }
};

TEST_F(CudaExpertKernelsTest, TakesItsMemoryBeforeAnythingIsLoaded) {
  CudaTestRank device;
  const auto kernels = device.NewKernels(Shape(512, 256)).value();
  EXPECT_EQ(kernels->weight_bytes(), 3 * 3 * 512 * 256 * 2);
  EXPECT_GE(CountEmulatedCuda().device_bytes, kernels->weight_bytes());
  EXPECT_EQ(kernels->capabilities().instruction_set, "sm_90");
}

TEST_F(CudaExpertKernelsTest, SaysWhatIsNeededAndFree) {
  CudaTestRank device;
  const absl::Status status = device.NewKernels(Shape(4096, 1024)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("need 75497472 bytes of the GPU's memory"),
                             HasSubstr("of 67108864 are free"), HasSubstr("cudaMalloc")));
  ExpertLayerShape shape = Shape(int64_t{1} << 40, int64_t{1} << 40);
  EXPECT_EQ(device.NewKernels(shape).status().code(), absl::StatusCode::kResourceExhausted);
}

// Chunks of 4 MiB: here several of them.
TEST_F(CudaExpertKernelsTest, AWeightThatArrivesAnotherIsFound) {
  const ExpertLayerShape shape = Shape(2048, 1500);
  const RandomLayer layer(shape, /*with_biases=*/false, 3);
  CudaTestRank device;
  const auto kernels = device.NewKernels(shape).value();
  for (const int64_t num_copies : {0, 1, 2, 3}) {
    CorruptEmulatedCopy(num_copies);
    const absl::Status status = kernels->LoadExpert(1, layer.Weights(1));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("local expert 1: upload: byte "));
  }
  EXPECT_TRUE(kernels->LoadExpert(1, layer.Weights(1)).ok());
}

// What the activation runs in does not depend on biases, and an expert without any has zeros.
TEST_F(CudaExpertKernelsTest, SomeExpertsHaveBiases) {
  const ExpertLayerShape shape = Shape(16, 8);
  RandomLayer layer(shape, /*with_biases=*/true, 3);
  std::fill_n(layer.reference.w13_bias.begin(), 2 * shape.intermediate_size, 0.0);
  std::fill_n(layer.reference.w2_bias.begin(), shape.hidden_size, 0.0);
  const RowsByExpert rows = RandomRows(shape, {3, 2, 0}, DType::kBFloat16, 4);
  for (const bool is_first : {true, false}) {
    CudaTestRank device;
    const auto kernels = device.NewKernels(shape).value();
    ExpertWeights without = layer.Weights(0);
    without.gate_bias = without.up_bias = without.down_bias = nullptr;
    for (const int32_t e :
         is_first ? std::vector<int32_t>{0, 1, 2} : std::vector<int32_t>{2, 1, 0}) {
      ASSERT_TRUE(kernels->LoadExpert(e, e == 0 ? without : layer.Weights(e)).ok());
    }
    ExpectNearReference(layer, rows,
                        RunFfn(*kernels, rows, DType::kBFloat16, ActivationFormat::kContiguous,
                               {*device.allocators.device, *device.stream}),
                        DType::kBFloat16);
  }
}

TEST_F(CudaExpertKernelsTest, ALostDeviceEndsLoading) {
  const ExpertLayerShape shape = Shape(64, 64);
  const RandomLayer layer(shape, /*with_biases=*/true, 3);
  CudaTestRank device;
  const auto kernels = device.NewKernels(shape).value();
  FailEmulatedWork(cudaErrorIllegalAddress, 3);
  const absl::Status status = kernels->LoadExpert(0, layer.Weights(0));
  EXPECT_THAT(std::string(status.message()), HasSubstr("the process must be restarted"));
}

}  // namespace
}  // namespace expertmesh
