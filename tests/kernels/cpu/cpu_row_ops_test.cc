#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "kernels/cpu/cpu_kernels.h"
#include "tests/conformance/row_ops_conformance.h"
#include "tests/kernels/cpu/random_layer.h"

namespace expertmesh {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr std::byte kPoison{0xab};

ParallelForOptions TwoThreads() {
  ParallelForOptions options;
  options.num_threads = 2;
  return options;
}

class CpuRowOpsDevice : public RowOpsDevice {
 public:
  explicit CpuRowOpsDevice(CpuIsa isa) : row_ops_(NewCpuRowOps(isa, &parallel_for_).value()) {}
  RowOps& row_ops() override { return *row_ops_; }
  Stream& stream() override { return *stream_; }
  Allocator& allocator() override { return memory_; }
  Allocator& request_allocator() override { return memory_; }

 private:
  HostBufferPool memory_;
  ParallelFor parallel_for_{TwoThreads()};
  const std::unique_ptr<RowOps> row_ops_;
  const std::unique_ptr<Stream> stream_ = NewInlineHostStream();
};

std::vector<RowOpsKind> CpuKinds() {
  std::vector<RowOpsKind> kinds;
  for (const CpuIsa isa : SupportedCpuIsas()) {
    kinds.push_back({CpuIsaName(isa), [isa] { return std::make_unique<CpuRowOpsDevice>(isa); }});
  }
  return kinds;
}

class CpuRowOpsTest : public testing::TestWithParam<std::tuple<CpuIsa, DType>> {
 protected:
  void Gather(const GatherRowsParams& params) {
    const absl::Status status = row_ops_->GatherRows(params, *stream_);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(stream_->Wait(absl::InfiniteFuture()).ok());
  }
  void Sum(const SumRowsParams& params) {
    const absl::Status status = row_ops_->SumRows(params, *stream_);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(stream_->Wait(absl::InfiniteFuture()).ok());
  }

  const DType dtype_ = std::get<1>(GetParam());
  ParallelFor parallel_for_{TwoThreads()};
  const std::unique_ptr<RowOps> row_ops_ =
      NewCpuRowOps(std::get<0>(GetParam()), &parallel_for_).value();
  const std::unique_ptr<Stream> stream_ = NewInlineHostStream();
  std::mt19937_64 random_{7};
};

// Enough rows for both threads.
TEST_P(CpuRowOpsTest, LargeGatherAndSum) {
  const int64_t hidden_size = 512;
  const int32_t num_rows = 6000;
  const std::vector<std::byte> rows =
      ToBytes(RandomValues(random_, num_rows * hidden_size, 1.0, dtype_), dtype_);
  const RowSpan source = {rows.data(), num_rows};
  std::vector<int32_t> indices(static_cast<size_t>(num_rows));
  for (int32_t i = 0; i < num_rows; ++i) indices[static_cast<size_t>(i)] = num_rows - 1 - i;
  std::vector<std::byte> reversed(rows.size(), kPoison);
  GatherRowsParams gather;
  gather.sources = absl::MakeConstSpan(&source, 1);
  gather.hidden_size = hidden_size;
  gather.dtype = dtype_;
  gather.row_indices = indices;
  gather.output = reversed.data();
  Gather(gather);

  std::vector<int64_t> offsets = {0};
  std::vector<int64_t> entries;
  for (int32_t i = 0; i < num_rows; ++i) {
    entries.push_back(num_rows - 1 - i);
    offsets.push_back(static_cast<int64_t>(entries.size()));
  }
  std::vector<std::byte> restored(rows.size(), kPoison);
  SumRowsParams sum;
  sum.rows = reversed.data();
  sum.rows_dtype = dtype_;
  sum.hidden_size = hidden_size;
  sum.offsets = offsets;
  sum.row_indices = entries;
  sum.output = restored.data();
  sum.output_dtype = dtype_;
  Sum(sum);
  EXPECT_EQ(restored, rows);
}

INSTANTIATE_TEST_SUITE_P(Cpu, RowOpsConformance,
                         testing::Combine(testing::ValuesIn(CpuKinds()),
                                          testing::ValuesIn(kDTypes)),
                         RowOpsConformanceName);

INSTANTIATE_TEST_SUITE_P(All, CpuRowOpsTest,
                         testing::Combine(testing::ValuesIn(SupportedCpuIsas()),
                                          testing::ValuesIn(kDTypes)),
                         [](const testing::TestParamInfo<std::tuple<CpuIsa, DType>>& instance) {
                           return std::string(CpuIsaName(std::get<0>(instance.param))) + "_" +
                                  std::string(DTypeName(std::get<1>(instance.param)));
                         });

}  // namespace
}  // namespace expertmesh
