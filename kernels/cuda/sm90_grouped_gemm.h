#ifndef EXPERTMESH_KERNELS_CUDA_SM90_GROUPED_GEMM_H_
#define EXPERTMESH_KERNELS_CUDA_SM90_GROUPED_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/gemm_groups.h"
#include "kernels/cuda/gemm_tile.h"
#include "kernels/cuda/grouped_gemm.h"

namespace expertmesh {

// Hopper's tensor core kernels (wgmma and TMA, from CUTLASS). CMake compiles them for sm_90a alone;
// other builds, and the tests on a CPU, link sm90_grouped_gemm_absent.cc.

// Multiprocessors of the current device; 0 when it is no sm_90 or the build has no kernels for it.
int Sm90Multiprocessors();

// What one launch needs beyond CudaGroupedGemmParams, whose arrays that name groups are not read.
struct Sm90GemmLaunch {
  GemmTile tile = GemmTile::kRows64;
  GemmGroupArrays arrays;  // on the device, written before by the stream
  int32_t num_groups = 0;
  // Tiles of all groups, at most: there is no use in more blocks.
  int64_t max_tiles = 0;
  std::byte* tensor_maps = nullptr;  // kSm90TensorMapBytes, 128-byte aligned
};

// Each block keeps two tensor maps of 128 bytes of its own.
inline constexpr int kSm90MaxMultiprocessors = 256;
inline constexpr int64_t kSm90TensorMapBytes = 2 * 128 * kSm90MaxMultiprocessors;

// Enqueues the product; the element types are those that GroupedGemmUsesTensorCores names. Not
// blocking. Local. Thread safe.
[[nodiscard]] cudaError_t LaunchSm90GroupedGemm(const CudaGroupedGemmParams& params,
                                                const Sm90GemmLaunch& launch, cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_SM90_GROUPED_GEMM_H_
