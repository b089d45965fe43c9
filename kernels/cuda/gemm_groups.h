#ifndef EXPERTMESH_KERNELS_CUDA_GEMM_GROUPS_H_
#define EXPERTMESH_KERNELS_CUDA_GEMM_GROUPS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "kernels/cuda/grouped_gemm.h"

namespace expertmesh {

// One expert's part of a grouped GEMM.
struct GemmGroup {
  int64_t first_row = 0;
  int32_t num_rows = 0;
  int32_t expert = 0;
};

// The experts that have rows, from the host's arrays. cudaErrorInvalidValue when offsets do not
// ascend, a count is outside [0, max_rows_per_expert], or an expert has more than INT32_MAX rows.
[[nodiscard]] cudaError_t GemmGroupsFromHost(const CudaGroupedGemmParams& params,
                                             std::vector<GemmGroup>* groups);

// Enqueues the copy of `groups` to `device_groups`. They travel as kernel parameters: neither
// pinned memory nor the lifetime of the host's array matters.
[[nodiscard]] cudaError_t LaunchWriteGemmGroups(const std::vector<GemmGroup>& groups,
                                                GemmGroup* device_groups, cudaStream_t stream);

// All experts of a batched GEMM, with or without rows, from counts on the device.
struct MaskedGemmGroupsParams {
  const int32_t* expert_num_tokens = nullptr;  // device, [num_experts]
  int64_t max_rows_per_expert = 0;
  int32_t num_experts = 0;
  GemmGroup* groups = nullptr;  // device, [num_experts]
};
[[nodiscard]] cudaError_t LaunchWriteMaskedGemmGroups(const MaskedGemmGroupsParams& params,
                                                      cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_GEMM_GROUPS_H_
