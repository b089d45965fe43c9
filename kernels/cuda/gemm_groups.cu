#include <algorithm>
#include <limits>

#include "kernels/cuda/gemm_groups.h"
#include "kernels/cuda/launch_kernel.cuh"

namespace expertmesh {
namespace {

constexpr int kThreads = 128;
// Kernel parameters may take 4 KiB.
constexpr size_t kGroupsPerLaunch = 232;

// What of a product every group's entries depend on.
struct GroupOperands {
  const std::byte* weights = nullptr;
  const std::byte* rows = nullptr;
  const float* weight_scales = nullptr;
  const float* row_scales = nullptr;
  int64_t element_bytes = 0;  // of both operands where they are alike
  int64_t n = 0;
  int64_t k = 0;
};

struct WriteGroupsParams {
  GroupOperands operands;
  GemmGroupArrays arrays;
  int32_t first_group = 0;
  int32_t num_groups = 0;
  GemmGroup groups[kGroupsPerLaunch];
};
static_assert(sizeof(WriteGroupsParams) <= 4096);

struct WriteMaskedGroupsParams {
  GroupOperands operands;
  GemmGroupArrays arrays;
  const int32_t* expert_num_tokens = nullptr;
  int64_t max_rows_per_expert = 0;
  int32_t num_experts = 0;
};

__device__ __forceinline__ void WriteGroup(const GroupOperands& operands,
                                           const GemmGroupArrays& arrays, int64_t index,
                                           const GemmGroup& group) {
  const int64_t expert = group.expert;
  const int64_t k_blocks = (operands.k + kGemmScaleBlock - 1) / kGemmScaleBlock;
  const int64_t n_blocks = (operands.n + kGemmScaleBlock - 1) / kGemmScaleBlock;
  arrays.groups[index] = group;
  arrays.shapes[index] = {static_cast<int32_t>(operands.n), group.num_rows,
                          static_cast<int32_t>(operands.k)};
  arrays.weights[index] =
      operands.weights + expert * operands.n * operands.k * operands.element_bytes;
  arrays.rows[index] = operands.rows + group.first_row * operands.k * operands.element_bytes;
  arrays.strides[index] = operands.k;
  const bool is_scaled = operands.weight_scales != nullptr;
  arrays.weight_scales[index] =
      is_scaled ? operands.weight_scales + expert * n_blocks * k_blocks : nullptr;
  arrays.row_scales[index] = is_scaled ? operands.row_scales + group.first_row * k_blocks : nullptr;
}

__global__ void __launch_bounds__(kThreads)
    WriteGroups(const __grid_constant__ WriteGroupsParams params) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < params.num_groups; i += kThreads) {
    WriteGroup(params.operands, params.arrays, params.first_group + i, params.groups[i]);
  }
}

__global__ void __launch_bounds__(kThreads)
    WriteMaskedGroups(const __grid_constant__ WriteMaskedGroupsParams params) {
  for (int64_t e = int64_t{blockIdx.x} * kThreads + threadIdx.x; e < params.num_experts;
       e += int64_t{gridDim.x} * kThreads) {
    const int64_t count = params.expert_num_tokens[e];
    GemmGroup group;
    group.first_row = e * params.max_rows_per_expert;
    group.num_rows = static_cast<int32_t>(
        count < 0 ? 0 : (count > params.max_rows_per_expert ? params.max_rows_per_expert : count));
    group.expert = static_cast<int32_t>(e);
    WriteGroup(params.operands, params.arrays, e, group);
  }
}

GroupOperands OperandsOf(const CudaGroupedGemmParams& params) {
  GroupOperands operands;
  operands.weights = static_cast<const std::byte*>(params.weights);
  operands.rows = static_cast<const std::byte*>(params.rows);
  operands.weight_scales = params.weight_scales;
  operands.row_scales = params.row_scales;
  operands.element_bytes = DTypeBytes(params.weight_dtype);
  operands.n = params.n;
  operands.k = params.k;
  return operands;
}

}  // namespace

GemmGroupArrays GemmGroupArraysAt(std::byte* workspace, int32_t num_experts, int64_t* size_bytes) {
  GemmGroupArrays arrays;
  int64_t used = 0;
  const auto place = [&](auto*& array) {
    constexpr int64_t kAlignment = 256;
    if (workspace != nullptr) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(workspace + used);
    }
    const int64_t bytes = num_experts * static_cast<int64_t>(sizeof(*array));
    used += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  place(arrays.groups);
  place(arrays.shapes);
  place(arrays.weights);
  place(arrays.rows);
  place(arrays.strides);
  place(arrays.weight_scales);
  place(arrays.row_scales);
  *size_bytes = used;
  return arrays;
}

cudaError_t GemmGroupsFromHost(const CudaGroupedGemmParams& params,
                               std::vector<GemmGroup>* groups) {
  groups->clear();
  const bool batched = params.max_rows_per_expert > 0;
  for (int32_t e = 0; e < params.num_experts; ++e) {
    const int64_t first = batched ? e * params.max_rows_per_expert : params.expert_offsets[e];
    const int64_t count =
        batched ? params.expert_num_tokens[e] : params.expert_offsets[e + 1] - first;
    if (first < 0 || count < 0 || count > std::numeric_limits<int32_t>::max() ||
        (batched && count > params.max_rows_per_expert)) {
      return cudaErrorInvalidValue;
    }
    if (count > 0) groups->push_back({first, static_cast<int32_t>(count), e});
  }
  return cudaSuccess;
}

cudaError_t LaunchWriteGemmGroups(const CudaGroupedGemmParams& params,
                                  const std::vector<GemmGroup>& groups,
                                  const GemmGroupArrays& arrays, cudaStream_t stream) {
  for (size_t first = 0; first < groups.size(); first += kGroupsPerLaunch) {
    const size_t count = std::min(kGroupsPerLaunch, groups.size() - first);
    WriteGroupsParams write;
    write.operands = OperandsOf(params);
    write.arrays = arrays;
    write.first_group = static_cast<int32_t>(first);
    write.num_groups = static_cast<int32_t>(count);
    std::copy_n(groups.begin() + static_cast<std::ptrdiff_t>(first), count, write.groups);
    const cudaError_t error = LaunchKernel(WriteGroups, 1, kThreads, stream, write);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchWriteMaskedGemmGroups(const CudaGroupedGemmParams& params,
                                        const GemmGroupArrays& arrays, cudaStream_t stream) {
  WriteMaskedGroupsParams write;
  write.operands = OperandsOf(params);
  write.arrays = arrays;
  write.expert_num_tokens = params.expert_num_tokens;
  write.max_rows_per_expert = params.max_rows_per_expert;
  write.num_experts = params.num_experts;
  return LaunchKernel(WriteMaskedGroups, GridExtent(params.num_experts, kThreads, kMaxGridX),
                      kThreads, stream, write);
}

}  // namespace expertmesh
