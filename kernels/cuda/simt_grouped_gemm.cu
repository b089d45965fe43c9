#include <cuda_fp8.h>

#include "kernels/cuda/float_math.cuh"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/row_vectors.cuh"
#include "kernels/cuda/simt_grouped_gemm.h"

namespace expertmesh {
namespace {

constexpr int kThreads = 256;
constexpr int kTileK = 16;
// Each thread has 4 x 4 outputs: rows thread / 16 + 16 * i, columns thread % 16 + 16 * j.
constexpr int kPerThread = 4;
constexpr int kThreadsAcross = kSimtTileColumns / kPerThread;
// One more column than used, so that what is stored along k does not meet in one bank.
constexpr int kPitch = kSimtTileRows + 1;
// Of a fused product: sixteen lanes hold one gate's eight columns and its up's.
static_assert(kThreadsAcross == 16);
static_assert(kSimtTileRows == kSimtTileColumns && kThreadsAcross * kThreadsAcross == kThreads);
static_assert(kGemmScaleBlock % kTileK == 0 && kGemmScaleBlock % kSimtTileColumns == 0);

struct SimtParams {
  CudaGroupedGemmParams gemm;
  const GemmGroup* groups = nullptr;
  int32_t num_groups = 0;
};

__device__ __forceinline__ float OperandToFloat(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
template <class T>
__device__ __forceinline__ float OperandToFloat(T x) {
  return ToFloat(x);
}

// Rows [first, first + kSimtTileRows) of a matrix, k from first_k on, transposed; zeros beyond.
template <class T>
__device__ __forceinline__ void LoadTile(const T* matrix, int64_t first, int64_t num_rows,
                                         int64_t first_k, int64_t k, float (*tile)[kPitch]) {
  constexpr int kThreadsPerRow = kTileK / kPerThread;
  const int row = static_cast<int>(threadIdx.x) / kThreadsPerRow;
  const int tile_k = static_cast<int>(threadIdx.x) % kThreadsPerRow * kPerThread;
  const T* source = matrix + (first + row) * k + first_k;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const bool exists = first + row < num_rows && first_k + tile_k + i < k;
    tile[tile_k + i][row] = exists ? OperandToFloat(source[tile_k + i]) : 0.0f;
  }
}

__device__ __forceinline__ void StoreOutput(const CudaGroupedGemmParams& gemm, int64_t at,
                                            float value) {
  if (gemm.output_dtype == DType::kFloat32) {
    static_cast<float*>(gemm.output)[at] = value;
  } else if (gemm.output_dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(gemm.output)[at] = FromFloat<__nv_bfloat16>(value);
  } else {
    static_cast<__half*>(gemm.output)[at] = FromFloat<__half>(value);
  }
}

template <class In, class Weight>
__global__ void __launch_bounds__(kThreads)
    SimtGroupedGemm(const __grid_constant__ SimtParams params) {
  constexpr bool kScaled = sizeof(In) == 1;
  __shared__ float row_tile[kTileK][kPitch];
  __shared__ float weight_tile[kTileK][kPitch];
  const CudaGroupedGemmParams& gemm = params.gemm;
  const int64_t k_blocks = (gemm.k + kGemmScaleBlock - 1) / kGemmScaleBlock;
  const int64_t n_blocks = (gemm.n + kGemmScaleBlock - 1) / kGemmScaleBlock;
  const int64_t column_tiles = (gemm.n + kSimtTileColumns - 1) / kSimtTileColumns;
  const int thread_row = static_cast<int>(threadIdx.x) / kThreadsAcross;
  const int thread_column = static_cast<int>(threadIdx.x) % kThreadsAcross;
  int32_t index = 0;
  int64_t first_tile = 0;  // of group `index`
  for (int64_t tile = blockIdx.x;; tile += gridDim.x) {
    for (; index < params.num_groups; ++index) {
      const int64_t row_tiles =
          (int64_t{params.groups[index].num_rows} + kSimtTileRows - 1) / kSimtTileRows;
      if (tile - first_tile < row_tiles * column_tiles) break;
      first_tile += row_tiles * column_tiles;
    }
    if (index >= params.num_groups) return;
    const GemmGroup group = params.groups[index];
    const int64_t row = (tile - first_tile) / column_tiles * kSimtTileRows;
    const int64_t column = (tile - first_tile) % column_tiles * kSimtTileColumns;
    const In* rows = static_cast<const In*>(gemm.rows) + group.first_row * gemm.k;
    const Weight* weight =
        static_cast<const Weight*>(gemm.weights) + int64_t{group.expert} * gemm.n * gemm.k;

    float sums[kPerThread][kPerThread] = {};
    float totals[kPerThread][kPerThread] = {};  // of finished scale blocks
    for (int64_t first_k = 0; first_k < gemm.k; first_k += kTileK) {
      LoadTile(rows, row, group.num_rows, first_k, gemm.k, row_tile);
      LoadTile(weight, column, gemm.n, first_k, gemm.k, weight_tile);
      __syncthreads();
      // Not beyond k: adding 0 * 0 would turn a sum of -0 into +0.
      const int end = gemm.k - first_k < kTileK ? static_cast<int>(gemm.k - first_k) : kTileK;
      for (int i_k = 0; i_k < end; ++i_k) {
        float x[kPerThread];
        float w[kPerThread];
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
          x[i] = row_tile[i_k][thread_row + i * kThreadsAcross];
          w[i] = weight_tile[i_k][thread_column + i * kThreadsAcross];
        }
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
          for (int j = 0; j < kPerThread; ++j) sums[i][j] = __fmaf_rn(x[i], w[j], sums[i][j]);
        }
      }
      __syncthreads();
      if constexpr (kScaled) {
        const int64_t next_k = first_k + kTileK;
        if (next_k % kGemmScaleBlock != 0 && next_k < gemm.k) continue;
        const int64_t k_block = first_k / kGemmScaleBlock;
        const float weight_scale =
            gemm.weight_scales[(group.expert * n_blocks + column / kGemmScaleBlock) * k_blocks +
                               k_block];
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
          const int64_t i_row = row + thread_row + i * kThreadsAcross;
          float scale = 0.0f;
          if (i_row < group.num_rows) {
            scale = __fmul_rn(gemm.row_scales[(group.first_row + i_row) * k_blocks + k_block],
                              weight_scale);
          }
#pragma unroll
          for (int j = 0; j < kPerThread; ++j) {
            totals[i][j] = __fmaf_rn(sums[i][j], scale, totals[i][j]);
            sums[i][j] = 0.0f;
          }
        }
      }
    }

#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t i_row = row + thread_row + i * kThreadsAcross;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int64_t j_column = column + thread_column + j * kThreadsAcross;
        float value = kScaled ? totals[i][j] : sums[i][j];
        const bool exists = i_row < group.num_rows && j_column < gemm.n;
        if (gemm.bias != nullptr && j_column < gemm.n) {
          value = __fadd_rn(value, gemm.bias[int64_t{group.expert} * gemm.n + j_column]);
        }
        if (kScaled || !gemm.fuse_silu_mul) {
          if (exists) StoreOutput(gemm, (group.first_row + i_row) * gemm.n + j_column, value);
          continue;
        }
        // The up's sum of a gate's column is eight lanes further.
        const float up = __shfl_down_sync(0xffffffffu, value, 8);
        if (!exists || thread_column >= 8) continue;
        StoreOutput(gemm,
                    (group.first_row + i_row) * (gemm.n / 2) + j_column / 16 * 8 + j_column % 8,
                    __fmul_rn(SwishFloat(value, value), up));
      }
    }
  }
}

}  // namespace

cudaError_t LaunchSimtGroupedGemm(const CudaGroupedGemmParams& params,
                                  const GemmGroup* device_groups, int32_t num_groups,
                                  int64_t max_row_tiles, cudaStream_t stream) {
  const int64_t column_tiles = (params.n + kSimtTileColumns - 1) / kSimtTileColumns;
  // Not multiplied before it is cut: the product may not fit.
  const int64_t row_tiles =
      max_row_tiles < kMaxGridX / column_tiles ? max_row_tiles : kMaxGridX / column_tiles;
  const unsigned grid = GridExtent(row_tiles * column_tiles, 1, kMaxGridX);
  const SimtParams simt = {params, device_groups, num_groups};
  if (params.rows_dtype == DType::kFloat8E4M3) {
    return LaunchKernel(SimtGroupedGemm<__nv_fp8_e4m3, __nv_fp8_e4m3>, grid, kThreads, stream,
                        simt);
  }
  return WithActivationType(params.rows_dtype, [&](auto in_tag) {
    return WithActivationType(params.weight_dtype, [&](auto weight_tag) {
      return LaunchKernel(
          SimtGroupedGemm<typename decltype(in_tag)::Type, typename decltype(weight_tag)::Type>,
          grid, kThreads, stream, simt);
    });
  });
}

}  // namespace expertmesh
