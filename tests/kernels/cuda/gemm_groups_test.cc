#include "kernels/cuda/gemm_groups.h"

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/device_bytes.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {
namespace {

// Addresses that are only computed with, never read.
template <class T>
T* AddressOf(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}
int64_t Number(const void* address) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address));
}

constexpr int64_t kWeights = int64_t{1} << 40;
constexpr int64_t kRows = int64_t{2} << 40;
constexpr int64_t kWeightScales = int64_t{3} << 40;
constexpr int64_t kRowScales = int64_t{4} << 40;

CudaGroupedGemmParams Params(DType dtype, int32_t num_experts, int64_t n, int64_t k) {
  CudaGroupedGemmParams params;
  params.num_experts = num_experts;
  params.rows = AddressOf<void>(kRows);
  params.weights = AddressOf<void>(kWeights);
  params.rows_dtype = params.weight_dtype = dtype;
  params.n = n;
  params.k = k;
  if (dtype == DType::kFloat8E4M3) {
    params.weight_scales = AddressOf<float>(kWeightScales);
    params.row_scales = AddressOf<float>(kRowScales);
  }
  return params;
}

// Writes the arrays on the test device and checks every entry.
template <class Write>
void WriteAndCheck(const CudaGroupedGemmParams& params, const std::vector<GemmGroup>& groups,
                   Write write) {
  int64_t bytes = 0;
  static_cast<void>(GemmGroupArraysAt(nullptr, params.num_experts, &bytes));
  const DeviceBytes memory(bytes);
  const GemmGroupArrays arrays = GemmGroupArraysAt(memory.data(), params.num_experts, &bytes);
  BeginRun(1);
  ASSERT_EQ(write(arrays), cudaSuccess);
  ASSERT_EQ(EndRun(), cudaSuccess);
  memory.ExpectGuardsIntact();
  const int64_t element_bytes = DTypeBytes(params.weight_dtype);
  const int64_t n_blocks = (params.n + 127) / 128;
  const int64_t k_blocks = (params.k + 127) / 128;
  for (size_t i = 0; i < groups.size(); ++i) {
    SCOPED_TRACE("group " + std::to_string(i));
    const GemmGroup& group = groups[i];
    EXPECT_EQ(arrays.groups[i].first_row, group.first_row);
    EXPECT_EQ(arrays.groups[i].num_rows, group.num_rows);
    EXPECT_EQ(arrays.groups[i].expert, group.expert);
    EXPECT_EQ(arrays.shapes[i].weight_rows, params.n);
    EXPECT_EQ(arrays.shapes[i].num_rows, group.num_rows);
    EXPECT_EQ(arrays.shapes[i].k, params.k);
    EXPECT_EQ(arrays.strides[i], params.k);
    EXPECT_EQ(Number(arrays.weights[i]),
              kWeights + group.expert * params.n * params.k * element_bytes);
    EXPECT_EQ(Number(arrays.rows[i]), kRows + group.first_row * params.k * element_bytes);
    if (params.weight_scales == nullptr) {
      EXPECT_EQ(arrays.weight_scales[i], nullptr);
      EXPECT_EQ(arrays.row_scales[i], nullptr);
    } else {
      EXPECT_EQ(Number(arrays.weight_scales[i]),
                kWeightScales + group.expert * n_blocks * k_blocks * 4);
      EXPECT_EQ(Number(arrays.row_scales[i]), kRowScales + group.first_row * k_blocks * 4);
    }
    if (testing::Test::HasFailure()) return;
  }
}

TEST(GemmGroupsTest, ExpertsWithRowsAlone) {
  const std::vector<int64_t> offsets = {0, 0, 5, 5, 6, 9, 9};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat32}) {
    CudaGroupedGemmParams params = Params(dtype, 6, 200, 384);
    params.expert_offsets = offsets.data();
    std::vector<GemmGroup> groups;
    ASSERT_EQ(GemmGroupsFromHost(params, &groups), cudaSuccess);
    ASSERT_EQ(groups.size(), 3u);
    EXPECT_EQ(groups[1].expert, 3);
    EXPECT_EQ(groups[1].first_row, 5);
    EXPECT_EQ(groups[1].num_rows, 1);
    WriteAndCheck(params, groups, [&](const GemmGroupArrays& arrays) {
      return LaunchWriteGemmGroups(params, groups, arrays, nullptr);
    });
  }
}

// Past 4 GiB of rows and weights, and past what one launch's parameters hold.
TEST(GemmGroupsTest, ManyLargeExperts) {
  std::vector<int64_t> offsets = {0};
  for (int64_t e = 0; e < 600; ++e) offsets.push_back(offsets.back() + e % 3 * 1000000007);
  CudaGroupedGemmParams params = Params(DType::kFloat8E4M3, 600, 14336, 7168);
  params.expert_offsets = offsets.data();
  std::vector<GemmGroup> groups;
  ASSERT_EQ(GemmGroupsFromHost(params, &groups), cudaSuccess);
  ASSERT_EQ(groups.size(), 400u);
  WriteAndCheck(params, groups, [&](const GemmGroupArrays& arrays) {
    return LaunchWriteGemmGroups(params, groups, arrays, nullptr);
  });
}

TEST(GemmGroupsTest, MaskedExpertsFromDeviceCounts) {
  std::vector<int32_t> tokens;
  std::vector<GemmGroup> groups;
  for (int32_t e = 0; e < 300; ++e) {
    tokens.push_back(e % 5 - 1);
    groups.push_back({e * int64_t{2}, std::min(std::max(e % 5 - 1, 0), 2), e});
  }
  const DeviceBytes device_tokens = DeviceCopy(tokens);
  CudaGroupedGemmParams params = Params(DType::kBFloat16, 300, 8, 16);
  params.max_rows_per_expert = 2;
  params.expert_num_tokens = device_tokens.As<int32_t>();
  WriteAndCheck(params, groups, [&](const GemmGroupArrays& arrays) {
    return LaunchWriteMaskedGemmGroups(params, arrays, nullptr);
  });
}

TEST(GemmGroupsTest, ArraysDoNotOverlap) {
  for (const int32_t num_experts : {1, 21, 64, 257}) {
    int64_t bytes = 0;
    auto* base = AddressOf<std::byte>(int64_t{1} << 20);
    const GemmGroupArrays arrays = GemmGroupArraysAt(base, num_experts, &bytes);
    const std::vector<std::pair<const void*, size_t>> parts = {
        {arrays.groups, sizeof(*arrays.groups)},
        {arrays.shapes, sizeof(*arrays.shapes)},
        {arrays.weights, sizeof(*arrays.weights)},
        {arrays.rows, sizeof(*arrays.rows)},
        {arrays.strides, sizeof(*arrays.strides)},
        {arrays.weight_scales, sizeof(*arrays.weight_scales)},
        {arrays.row_scales, sizeof(*arrays.row_scales)}};
    int64_t end = Number(base);
    for (const auto& [array, size] : parts) {
      EXPECT_GE(Number(array), end);
      EXPECT_EQ(Number(array) % 256, 0);
      end = Number(array) + num_experts * static_cast<int64_t>(size);
    }
    EXPECT_LE(end, Number(base) + bytes);
  }
}

}  // namespace
}  // namespace expertmesh
