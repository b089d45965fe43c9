#include <algorithm>
#include <limits>

#include "kernels/cuda/gemm_groups.h"
#include "kernels/cuda/launch_kernel.cuh"

namespace expertmesh {
namespace {

constexpr int kThreads = 128;
// Kernel parameters may take 4 KiB.
constexpr size_t kGroupsPerLaunch = 240;

struct WriteGroupsParams {
  GemmGroup* destination = nullptr;
  int32_t num_groups = 0;
  GemmGroup groups[kGroupsPerLaunch];
};
static_assert(sizeof(WriteGroupsParams) <= 4096);

__global__ void __launch_bounds__(kThreads)
    WriteGroups(const __grid_constant__ WriteGroupsParams params) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < params.num_groups; i += kThreads) {
    params.destination[i] = params.groups[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    WriteMaskedGroups(const __grid_constant__ MaskedGemmGroupsParams params) {
  for (int64_t e = int64_t{blockIdx.x} * kThreads + threadIdx.x; e < params.num_experts;
       e += int64_t{gridDim.x} * kThreads) {
    const int64_t count = params.expert_num_tokens[e];
    GemmGroup group;
    group.first_row = e * params.max_rows_per_expert;
    group.num_rows = static_cast<int32_t>(
        count < 0 ? 0 : (count > params.max_rows_per_expert ? params.max_rows_per_expert : count));
    group.expert = static_cast<int32_t>(e);
    params.groups[e] = group;
  }
}

}  // namespace

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

cudaError_t LaunchWriteGemmGroups(const std::vector<GemmGroup>& groups, GemmGroup* device_groups,
                                  cudaStream_t stream) {
  for (size_t first = 0; first < groups.size(); first += kGroupsPerLaunch) {
    const size_t count = std::min(kGroupsPerLaunch, groups.size() - first);
    WriteGroupsParams params;
    params.destination = device_groups + first;
    params.num_groups = static_cast<int32_t>(count);
    std::copy_n(groups.begin() + static_cast<std::ptrdiff_t>(first), count, params.groups);
    const cudaError_t error = LaunchKernel(WriteGroups, 1, kThreads, stream, params);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchWriteMaskedGemmGroups(const MaskedGemmGroupsParams& params, cudaStream_t stream) {
  return LaunchKernel(WriteMaskedGroups, GridExtent(params.num_experts, kThreads, kMaxGridX),
                      kThreads, stream, params);
}

}  // namespace expertmesh
