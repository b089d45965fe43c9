#ifndef EXPERTMESH_KERNELS_CUDA_GROUPED_GEMM_H_
#define EXPERTMESH_KERNELS_CUDA_GROUPED_GEMM_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "kernels/base/dtype.h"
#include "kernels/cuda/gemm_tile.h"

namespace expertmesh {

// Rows (or columns of a weight) and k that share one scale of a float8 operand.
inline constexpr int64_t kGemmScaleBlock = 128;

// output[row, :] = rows[row, :] · weights[e]ᵀ for the expert e of each row. Memory is on the device
// but for the two arrays that say otherwise. Element types:
//   rows and weights float32, float16 or bfloat16, in any pair; or both float8_e4m3 with scales
//   output           float32, float16 or bfloat16
struct CudaGroupedGemmParams {
  int32_t num_experts = 0;
  // contiguous: rows [expert_offsets[num_experts], k], those of expert e from expert_offsets[e] on
  //
  // batched (max_rows_per_expert > 0): rows [num_experts, max_rows_per_expert, k], of which an
  // expert's rows from expert_num_tokens[e] on are neither read nor written
  const void* rows = nullptr;
  DType rows_dtype = DType::kInvalid;
  // Host, [num_experts + 1], ascending; contiguous. Read before the call returns.
  const int64_t* expert_offsets = nullptr;
  // [num_experts], each in [0, max_rows_per_expert]; batched. Host, and read before the call
  // returns, for LaunchGroupedGemm; device for LaunchMaskedGroupedGemm.
  const int32_t* expert_num_tokens = nullptr;
  int64_t max_rows_per_expert = 0;
  const void* weights = nullptr;  // [num_experts, n, k]
  DType weight_dtype = DType::kInvalid;
  int64_t n = 0;
  int64_t k = 0;
  // Both for float8, else null.
  const float* row_scales = nullptr;     // shaped as rows, [..., ceil(k / kGemmScaleBlock)]
  const float* weight_scales = nullptr;  // [num_experts, ceil(n / block), ceil(k / block)]
  // [num_experts, n], in the order of the weight rows, or null: added to the sums in float32.
  const float* bias = nullptr;
  // The product goes through silu(gate) * up before it is rounded and stored: output is
  // [..., n / 2]. Rows of `weights` then lie as GateWeightRow and UpWeightRow say, and n is a
  // multiple of 16. Not with float8: a scale block would hold 64 of the gate's rows and 64 of the
  // up's, whose scales in a block-wise checkpoint are two.
  bool fuse_silu_mul = false;
  void* output = nullptr;  // shaped as rows, [..., n]
  DType output_dtype = DType::kInvalid;
  // Multiprocessors that the tensor cores' kernel, which else takes all of them, leaves to others:
  // see CudaDeviceOptions. No byte of the output depends on it.
  int32_t reserved_multiprocessors = 0;
  // For tests and measurements: the tensor cores' tile instead of ChooseGemmTile's.
  std::optional<GemmTile> tile;
  // Scratch of one launch at a time: launches of one stream may share it. 256-byte aligned.
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;  // at least GroupedGemmWorkspaceBytes(num_experts)
};

// Where the gate's and the up's row of intermediate column `i` lie among the weight rows of a fused
// product: eight of the one, eight of the other in turn, so that one thread holds both sums.
inline constexpr int64_t GateWeightRow(int64_t i) { return i / 8 * 16 + i % 8; }
inline constexpr int64_t UpWeightRow(int64_t i) { return GateWeightRow(i) + 8; }

int64_t GroupedGemmWorkspaceBytes(int32_t num_experts);

// Whether products run on the tensor cores, which depends on what a layer is, never on its rows:
// element types (both float16, both bfloat16 or both float8; output float32, or of a fused product
// the weights' own), rows of whole 16-byte vectors (float8: whole scale blocks), a device and a
// build for sm_90a. Else they run in float32 on the other cores. With tensor cores rows, weights
// and output must be 16-byte aligned.
bool GroupedGemmUsesTensorCores(const CudaGroupedGemmParams& params);

// Enqueues the product on `stream`; not blocking. Local. Thread safe. Memory must live until the
// stream has passed it. Sums are in float32 by ascending k over the whole of k, never split; float8
// products are summed per scale block, and block sums times both scales are added. Experts without
// rows are fine. cudaErrorInvalidValue when the params do not fit together;
// cudaErrorMisalignedAddress; other errors are the launch's.
//
// Whether a row's bytes depend on how many rows there are: not without tensor cores, where a sum is
// one chain of fused multiply-adds. With them the number of rows chooses a tile; every tile of an
// element type takes the same steps of k in the same order, but multiplies by instructions of
// another width in rows. That these round alike is no promise of the instruction set: it is to be
// seen on each GPU, by GroupedGemmTest.EveryTileGivesTheSameBytes.
[[nodiscard]] cudaError_t LaunchGroupedGemm(const CudaGroupedGemmParams& params,
                                            cudaStream_t stream);

// The same for the batched format with expert_num_tokens on the device: everything that the host
// decides depends on max_rows_per_expert alone, so it can be captured into a CUDA graph. A count
// outside [0, max_rows_per_expert] is taken as the nearer of the two.
[[nodiscard]] cudaError_t LaunchMaskedGroupedGemm(const CudaGroupedGemmParams& params,
                                                  cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_GROUPED_GEMM_H_
