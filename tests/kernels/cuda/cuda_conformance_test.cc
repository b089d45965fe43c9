// What stands behind kernels/'s interfaces, on the emulated device or on a GPU.

#include <memory>

#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "tests/conformance/expert_kernels_conformance.h"
#include "tests/conformance/float8_expert_kernels_conformance.h"
#include "tests/conformance/row_ops_conformance.h"
#include "tests/kernels/cuda/cuda_test_rank.h"

namespace expertmesh {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

class CudaRowOpsDevice : public RowOpsDevice {
 public:
  explicit CudaRowOpsDevice(bool pinned_requests) : pinned_requests_(pinned_requests) {}
  RowOps& row_ops() override { return *rank_.row_ops; }
  Stream& stream() override { return *rank_.stream; }
  Allocator& allocator() override { return *rank_.allocators.device; }
  Allocator& request_allocator() override {
    return pinned_requests_ ? static_cast<Allocator&>(*rank_.allocators.pinned) : pageable_;
  }

 private:
  const bool pinned_requests_;
  HostBufferPool pageable_;
  CudaTestRank rank_;
};

INSTANTIATE_TEST_SUITE_P(
    Cuda, RowOpsConformance,
    testing::Combine(
        testing::Values(
            RowOpsKind{"Pageable", [] { return std::make_unique<CudaRowOpsDevice>(false); }},
            RowOpsKind{"Pinned", [] { return std::make_unique<CudaRowOpsDevice>(true); }}),
        testing::ValuesIn(kDTypes)),
    RowOpsConformanceName);

class CudaExpertKernelsDevice : public ExpertKernelsDevice {
 public:
  absl::StatusOr<std::unique_ptr<ExpertKernels>> NewKernels(
      const ExpertLayerShape& shape) override {
    return rank_.NewKernels(shape);
  }
  Stream& stream() override { return *rank_.stream; }
  Allocator& allocator() override { return *rank_.allocators.device; }

 private:
  CudaTestRank rank_;
};

const ExpertKernelsKind kCudaExpertKernels = {
    "Cuda", [] { return std::make_unique<CudaExpertKernelsDevice>(); }};

INSTANTIATE_TEST_SUITE_P(Cuda, ExpertKernelsConformance,
                         testing::Combine(testing::Values(kCudaExpertKernels),
                                          testing::ValuesIn(kDTypes), testing::ValuesIn(kDTypes)),
                         ExpertKernelsParamName);

INSTANTIATE_TEST_SUITE_P(Cuda, Float8ExpertKernelsConformance,
                         testing::Combine(testing::Values(kCudaExpertKernels),
                                          testing::ValuesIn(kDTypes)),
                         Float8ExpertKernelsParamName);

}  // namespace
}  // namespace expertmesh
