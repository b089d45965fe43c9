#include "kernels/cuda/cuda_expert_kernels.h"

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/expert_kernels_conformance.h"
#include "tests/kernels/cuda/emulated_cuda_test.h"

namespace expertmesh {
namespace {

using testing::HasSubstr;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

class CudaExpertKernelsDevice : public ExpertKernelsDevice {
 public:
  absl::StatusOr<std::unique_ptr<ExpertKernels>> NewKernels(
      const ExpertLayerShape& shape) override {
    return NewCudaExpertKernels(shape, allocators_, streams_);
  }
  Stream& stream() override { return *stream_; }
  Allocator& allocator() override { return *allocators_.device; }
  const CudaAllocators& allocators() const { return allocators_; }

 private:
  const CudaAllocators allocators_ = {std::make_shared<CudaAllocator>(CudaMemory::kDevice, 0),
                                      std::make_shared<CudaAllocator>(CudaMemory::kPinnedHost, 0)};
  const std::shared_ptr<CudaStreamPool> streams_ = std::make_shared<CudaStreamPool>(0);
  const std::unique_ptr<CudaStream> stream_ = streams_->NewStream();
};

INSTANTIATE_TEST_SUITE_P(
    Cuda, ExpertKernelsConformance,
    testing::Combine(testing::Values(ExpertKernelsKind{
                         "Cuda", [] { return std::make_unique<CudaExpertKernelsDevice>(); }}),
                     testing::ValuesIn(kDTypes), testing::ValuesIn(kDTypes)),
    ExpertKernelsParamName);

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
  CudaExpertKernelsDevice device;
  const auto kernels = device.NewKernels(Shape(512, 256)).value();
  EXPECT_EQ(kernels->weight_bytes(), 3 * 3 * 512 * 256 * 2);
  EXPECT_GE(CountEmulatedCuda().device_bytes, kernels->weight_bytes());
  EXPECT_EQ(kernels->capabilities().instruction_set, "sm_90");
}

TEST_F(CudaExpertKernelsTest, SaysWhatIsNeededAndFree) {
  CudaExpertKernelsDevice device;
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
  CudaExpertKernelsDevice device;
  const auto kernels = device.NewKernels(shape).value();
  for (const int64_t num_copies : {0, 1, 2, 3}) {
    CorruptEmulatedCopy(num_copies);
    const absl::Status status = kernels->LoadExpert(1, layer.Weights(1));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("local expert 1: upload: byte "));
  }
  EXPECT_TRUE(kernels->LoadExpert(1, layer.Weights(1)).ok());
}

// Without biases silu runs within the first product, which wants gate and up rows in turns: the
// order cannot change once an expert lies in it.
TEST_F(CudaExpertKernelsTest, ABiasAfterAnExpertWithoutOneIsRefused) {
  const ExpertLayerShape shape = Shape(16, 8);
  const RandomLayer with_biases(shape, /*with_biases=*/true, 3);
  const RandomLayer without(shape, /*with_biases=*/false, 3);
  CudaExpertKernelsDevice device;
  const auto kernels = device.NewKernels(shape).value();
  ASSERT_TRUE(kernels->LoadExpert(0, without.Weights(0)).ok());
  EXPECT_EQ(kernels->LoadExpert(1, with_biases.Weights(1)).code(),
            absl::StatusCode::kFailedPrecondition);
  const auto others = device.NewKernels(shape).value();
  ASSERT_TRUE(others->LoadExpert(0, with_biases.Weights(0)).ok());
  EXPECT_TRUE(others->LoadExpert(1, without.Weights(1)).ok());
}

TEST_F(CudaExpertKernelsTest, ALostDeviceEndsLoading) {
  const ExpertLayerShape shape = Shape(64, 64);
  const RandomLayer layer(shape, /*with_biases=*/true, 3);
  CudaExpertKernelsDevice device;
  const auto kernels = device.NewKernels(shape).value();
  FailEmulatedWork(cudaErrorIllegalAddress, 3);
  const absl::Status status = kernels->LoadExpert(0, layer.Weights(0));
  EXPECT_THAT(std::string(status.message()), HasSubstr("the process must be restarted"));
}

}  // namespace
}  // namespace expertmesh
