#ifndef EXPERTMESH_KERNELS_CUDA_GEMM_GROUPS_H_
#define EXPERTMESH_KERNELS_CUDA_GEMM_GROUPS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
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

// What CUTLASS reads of a group, as (m, n, k) of weights [m, k] · rows [n, k]ᵀ: the weights are its
// A and their rows its M, so that a tile's N can be as few rows as an expert has.
struct GemmGroupShape {
  int32_t weight_rows = 0;
  int32_t num_rows = 0;
  int32_t k = 0;
};

// Arrays in a launch's workspace, one entry per group.
struct GemmGroupArrays {
  GemmGroup* groups = nullptr;
  GemmGroupShape* shapes = nullptr;
  const std::byte** weights = nullptr;
  const std::byte** rows = nullptr;
  int64_t* strides = nullptr;  // of both, in elements
  const float** weight_scales = nullptr;
  const float** row_scales = nullptr;
};

// Where they lie. `workspace` may be null to learn their size alone.
GemmGroupArrays GemmGroupArraysAt(std::byte* workspace, int32_t num_experts, int64_t* size_bytes);

// The experts that have rows, from the host's arrays. cudaErrorInvalidValue when offsets do not
// ascend, a count is outside [0, max_rows_per_expert], or an expert has more than INT32_MAX rows.
[[nodiscard]] cudaError_t GemmGroupsFromHost(const CudaGroupedGemmParams& params,
                                             std::vector<GemmGroup>* groups);

// Enqueues the writing of all arrays. `groups` travel as kernel parameters: neither pinned memory
// nor the lifetime of the host's array matters.
[[nodiscard]] cudaError_t LaunchWriteGemmGroups(const CudaGroupedGemmParams& params,
                                                const std::vector<GemmGroup>& groups,
                                                const GemmGroupArrays& arrays, cudaStream_t stream);

// The same for all experts of a batched GEMM, with or without rows, from
// params.expert_num_tokens on the device.
[[nodiscard]] cudaError_t LaunchWriteMaskedGemmGroups(const CudaGroupedGemmParams& params,
                                                      const GemmGroupArrays& arrays,
                                                      cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_GEMM_GROUPS_H_
