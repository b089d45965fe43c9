#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "kernels/cpu/cpu_kernels.h"
#include "tests/conformance/expert_kernels_conformance.h"
#include "tests/kernels/cpu/random_layer.h"

namespace expertmesh {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

ExpertLayerShape Shape(int32_t num_experts, int64_t hidden_size, int64_t intermediate_size,
                       DType weight_dtype) {
  ExpertLayerShape shape;
  shape.num_local_experts = num_experts;
  shape.hidden_size = hidden_size;
  shape.intermediate_size = intermediate_size;
  shape.weight_dtype = weight_dtype;
  return shape;
}

ParallelForOptions Threads(int num_threads) {
  ParallelForOptions options;
  options.num_threads = num_threads;
  return options;
}

class CpuExpertKernelsDevice : public ExpertKernelsDevice {
 public:
  explicit CpuExpertKernelsDevice(CpuIsa isa) : isa_(isa) {}
  absl::StatusOr<std::unique_ptr<ExpertKernels>> NewKernels(
      const ExpertLayerShape& shape) override {
    return NewCpuExpertKernels(shape, isa_, &parallel_for_);
  }
  Stream& stream() override { return *stream_; }
  Allocator& allocator() override { return memory_; }

 private:
  const CpuIsa isa_;
  HostBufferPool memory_;
  ParallelFor parallel_for_{Threads(2)};
  const std::unique_ptr<Stream> stream_ = NewInlineHostStream();
};

std::vector<ExpertKernelsKind> CpuKinds() {
  std::vector<ExpertKernelsKind> kinds;
  for (const CpuIsa isa : SupportedCpuIsas()) {
    kinds.push_back(
        {CpuIsaName(isa), [isa] { return std::make_unique<CpuExpertKernelsDevice>(isa); }});
  }
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(Cpu, ExpertKernelsConformance,
                         testing::Combine(testing::ValuesIn(CpuKinds()), testing::ValuesIn(kDTypes),
                                          testing::ValuesIn(kDTypes)),
                         ExpertKernelsParamName);

// Every instruction set here, activation dtype and weight dtype.
class CpuExpertKernelsTest : public testing::TestWithParam<std::tuple<CpuIsa, DType, DType>> {
 protected:
  const CpuIsa isa_ = std::get<0>(GetParam());
  const DType activation_dtype_ = std::get<1>(GetParam());
  const DType weight_dtype_ = std::get<2>(GetParam());

  void Check(const RandomLayer& layer, const std::vector<int32_t>& rows_per_expert, uint64_t seed,
             int num_threads = 2) {
    ParallelFor parallel_for(Threads(num_threads));
    const std::unique_ptr<ExpertKernels> kernels = layer.Load(isa_, &parallel_for);
    const RowsByExpert rows = RandomRows(layer.shape, rows_per_expert, activation_dtype_, seed);
    CheckBothFormats(
        layer.shape, seed,
        [&](ActivationFormat format) { return RunFfn(*kernels, rows, activation_dtype_, format); },
        [&](const OutputByExpert& output) {
          ExpectNearReference(layer, rows, output, activation_dtype_);
        });
  }
};

TEST_P(CpuExpertKernelsTest, OddSizesSkewedAndEmptyExperts) {
  uint64_t seed = 1;
  for (const int64_t hidden_size : {1, 2, 31, 33, 64, 200}) {
    for (const int64_t intermediate_size : {1, 7, 16, 33, 100}) {
      ++seed;
      const RandomLayer layer(Shape(5, hidden_size, intermediate_size, weight_dtype_),
                              /*with_biases=*/false, seed);
      Check(layer, {0, 1, 23, 0, 3}, seed);
    }
  }
}

// The sizes of a real model (GPT-OSS: hidden 2880), a row of each tile height and more than one row
// tile.
TEST_P(CpuExpertKernelsTest, LargeSizes) {
  const RandomLayer layer(Shape(3, 2880, 24, weight_dtype_), /*with_biases=*/false, 77);
  Check(layer, {2, 4, 9}, 77);
}

std::string ParamName(const testing::TestParamInfo<std::tuple<CpuIsa, DType, DType>>& info) {
  return std::string(CpuIsaName(std::get<0>(info.param))) + "_" +
         std::string(DTypeName(std::get<1>(info.param))) + "_rows_" +
         std::string(DTypeName(std::get<2>(info.param))) + "_weights";
}

INSTANTIATE_TEST_SUITE_P(All, CpuExpertKernelsTest,
                         testing::Combine(testing::ValuesIn(SupportedCpuIsas()),
                                          testing::ValuesIn(kDTypes), testing::ValuesIn(kDTypes)),
                         ParamName);

// Same bytes whatever a row is computed with.
class CpuExpertKernelsInvarianceTest : public CpuExpertKernelsTest {};

TEST_P(CpuExpertKernelsInvarianceTest, ARowsBytesDependOnNothingElse) {
  // Odd sizes, and more panels than one block so that every kernel's tail runs.
  const RandomLayer layer(Shape(3, 131, 115, weight_dtype_), /*with_biases=*/false, 21);
  const int64_t hidden_size = layer.shape.hidden_size;
  ParallelFor one_thread(Threads(1));
  const std::unique_ptr<ExpertKernels> kernels = layer.Load(isa_, &one_thread);
  const RowsByExpert alone_rows = RandomRows(layer.shape, {0, 1, 0}, activation_dtype_, 22);
  const OutputByExpert alone =
      RunFfn(*kernels, alone_rows, activation_dtype_, ActivationFormat::kContiguous);

  // Three threads split columns: the schedule depends on their number even where the work is too
  // small to share.
  for (const int num_threads : {1, 3}) {
    ParallelFor parallel_for(Threads(num_threads));
    const std::unique_ptr<ExpertKernels> same_kernels = layer.Load(isa_, &parallel_for);
    for (const int32_t num_rows : {1, 2, 3, 4, 5, 6, 7, 12, 13, 40}) {
      for (const int32_t position : {0, num_rows - 1}) {
        SCOPED_TRACE(std::to_string(num_threads) + " threads, row " + std::to_string(position) +
                     " of " + std::to_string(num_rows));
        RowsByExpert rows = RandomRows(layer.shape, {num_rows % 5, num_rows, num_rows % 3},
                                       activation_dtype_, static_cast<uint64_t>(num_rows));
        std::copy(alone_rows[1].begin(), alone_rows[1].end(),
                  rows[1].begin() + position * hidden_size);
        const OutputByExpert together =
            RunFfn(*same_kernels, rows, activation_dtype_,
                   num_rows % 2 == 0 ? ActivationFormat::kContiguous : ActivationFormat::kBatched);
        ASSERT_EQ(std::memcmp(together[1].data() + position * hidden_size, alone[1].data(),
                              static_cast<size_t>(hidden_size) * sizeof(float)),
                  0);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuExpertKernelsInvarianceTest,
                         testing::Combine(testing::ValuesIn(SupportedCpuIsas()),
                                          testing::ValuesIn(kDTypes), testing::ValuesIn(kDTypes)),
                         ParamName);

class CpuExpertKernelsThreadsTest : public testing::TestWithParam<CpuIsa> {};

// Enough work for ParallelFor to share, by whole experts and by columns; what is enough depends on
// the instruction set.
TEST_P(CpuExpertKernelsThreadsTest, ThreadCountsAndSchedules) {
  int32_t many = 16;
  if (GetParam() == CpuIsa::kAvx2) many = 100;
  if (GetParam() == CpuIsa::kAvx512Bf16) many = 340;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const RandomLayer layer(Shape(12, 384, 208, dtype), /*with_biases=*/false, 31);
    for (const std::vector<int32_t>& rows_per_expert :
         {std::vector<int32_t>{9, 8, 7, 9, 8, 7, 9, 8, 7, 9, 8, 7},
          std::vector<int32_t>{0, 0, 0, many, 0, 1, 0, 0, 0, 0, 0, 2}}) {
      const RowsByExpert rows = RandomRows(layer.shape, rows_per_expert, dtype, 32);
      OutputByExpert expected;
      for (const int num_threads : {1, 2, 3}) {
        ParallelFor parallel_for(Threads(num_threads));
        const std::unique_ptr<ExpertKernels> kernels = layer.Load(GetParam(), &parallel_for);
        const OutputByExpert output = RunFfn(*kernels, rows, dtype, ActivationFormat::kContiguous);
        if (expected.empty()) expected = output;
        EXPECT_EQ(output, expected) << num_threads << " threads";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuExpertKernelsThreadsTest, testing::ValuesIn(SupportedCpuIsas()),
                         [](const testing::TestParamInfo<CpuIsa>& instance) {
                           return std::string(CpuIsaName(instance.param));
                         });

}  // namespace
}  // namespace expertmesh
