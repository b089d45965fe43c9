#ifndef EXPERTMESH_KERNELS_CUDA_LAUNCH_KERNEL_CUH_
#define EXPERTMESH_KERNELS_CUDA_LAUNCH_KERNEL_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace expertmesh {

// Every kernel takes one params struct by value and strides over its grid, so a grid that was cut
// to the hardware's limits still does all the work.
template <class Params>
[[nodiscard]] cudaError_t LaunchKernel(void (*kernel)(Params), dim3 grid, dim3 block,
                                       cudaStream_t stream, const Params& params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params);
}

inline constexpr int64_t kMaxGridX = 0x7fffffff;
inline constexpr int64_t kMaxGridY = 0xffff;

// Blocks along one dimension of a grid: at least one.
inline unsigned GridExtent(int64_t num_items, int64_t items_per_block, int64_t max) {
  const int64_t blocks = num_items / items_per_block + (num_items % items_per_block != 0 ? 1 : 0);
  return static_cast<unsigned>(blocks < 1 ? 1 : (blocks > max ? max : blocks));
}

// The shape of kernels whose warps each take a piece of a row: rows along x, pieces along y.
inline constexpr int kWarpSize = 32;
inline constexpr int kWarpsPerBlock = 8;

inline dim3 RowPieceBlock() { return {kWarpSize, kWarpsPerBlock, 1}; }
inline dim3 RowPieceGrid(int64_t num_rows, int64_t num_columns, int64_t columns_per_warp) {
  return {GridExtent(num_rows, kWarpsPerBlock, kMaxGridX),
          GridExtent(num_columns, columns_per_warp, kMaxGridY), 1};
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_LAUNCH_KERNEL_CUH_
