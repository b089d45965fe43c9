#include "kernels/cuda/cuda_allocator.h"

#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_status.h"
#include "tests/conformance/allocator_conformance.h"
#include "tests/kernels/cuda/emulated_cuda_test.h"

namespace expertmesh {
namespace {

using testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(
    Cuda, AllocatorConformance,
    testing::Values(
        AllocatorKind{"Device",
                      [] { return std::make_unique<CudaAllocator>(CudaMemory::kDevice, 0); },
                      [](std::byte* data, int value, int64_t size_bytes) {
                        WithEmulatedMemory(
                            [=] { std::memset(data, value, static_cast<size_t>(size_bytes)); });
                      }},
        AllocatorKind{"Pinned",
                      [] { return std::make_unique<CudaAllocator>(CudaMemory::kPinnedHost, 0); }}),
    [](const auto& test) { return test.param.name; });

class CudaAllocatorTest : public EmulatedCudaTest {
 protected:
  CudaAllocatorTest() : EmulatedCudaTest({.num_devices = 2, .memory_bytes = 10 << 20}) {}
};

TEST_F(CudaAllocatorTest, TellsWhereItsMemoryIs) {
  EXPECT_EQ(CudaAllocator(CudaMemory::kDevice, 1).device(), (Device{DeviceType::kCuda, 1}));
  EXPECT_EQ(CudaAllocator(CudaMemory::kPinnedHost, 1).device(), Device{});
}

TEST_F(CudaAllocatorTest, WhatIsCachedIsGivenUpForASizeThatIsNot) {
  CudaAllocator allocator(CudaMemory::kDevice, 0);
  for (int round = 0; round < 5; ++round) {
    { const Buffer buffer = allocator.Allocate(6 << 20).value(); }
    { const Buffer buffer = allocator.Allocate(8 << 20).value(); }
  }
  const CudaMemoryUsage usage = allocator.usage();
  EXPECT_EQ(usage.allocated_bytes, 0);
  EXPECT_EQ(usage.cached_bytes, 8 << 20);
  EXPECT_EQ(CountEmulatedCuda().device_bytes, 8 << 20);
}

TEST_F(CudaAllocatorTest, OutOfMemoryNamesCallDeviceAndUse) {
  CudaAllocator allocator(CudaMemory::kDevice, 1);
  const Buffer buffer = allocator.Allocate(8 << 20).value();
  const absl::Status status = allocator.Allocate(4 << 20).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("cudaMalloc(4194304) on cuda:1: out of memory"),
                             HasSubstr("8388608 bytes in use")));
  EXPECT_TRUE(allocator.Allocate(1 << 20).ok());
}

TEST_F(CudaAllocatorTest, NothingIsLeft) {
  {
    CudaAllocator allocator(CudaMemory::kDevice, 0);
    CudaAllocator pinned(CudaMemory::kPinnedHost, 0);
    for (const int64_t size_bytes : {1, 1000, 70000}) {
      const Buffer device_buffer = allocator.Allocate(size_bytes).value();
      const Buffer pinned_buffer = pinned.Allocate(size_bytes).value();
    }
    EXPECT_GT(CountEmulatedCuda().device_bytes, 0);
    EXPECT_GT(CountEmulatedCuda().pinned_bytes, 0);
  }
  EXPECT_EQ(CountEmulatedCuda().device_bytes, 0);
  EXPECT_EQ(CountEmulatedCuda().pinned_bytes, 0);
}

TEST_F(CudaAllocatorTest, ChecksThatThereIsAGpu) {
  EXPECT_TRUE(CheckCudaDevice(1).ok());
  EXPECT_EQ(CheckCudaDevice(2), absl::FailedPreconditionError("no GPU 2: this process sees 2"));
  ResetEmulatedCuda({.num_devices = 0});
  EXPECT_EQ(CheckCudaDevice(0),
            absl::FailedPreconditionError(
                "no GPU: cudaGetDeviceCount: no CUDA-capable device is detected"));
}

}  // namespace
}  // namespace expertmesh
