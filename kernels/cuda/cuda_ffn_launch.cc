#include "kernels/cuda/cuda_ffn_launch.h"

#include <bit>
#include <type_traits>

#include "kernels/cuda/cuda_status.h"

namespace expertmesh {
namespace {

template <class T>
uint64_t WordOf(const T& value) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<uintptr_t>(value);
  } else if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<uint32_t>(value);
  } else if constexpr (std::is_same_v<T, std::optional<GemmTile>>) {
    return value.has_value() ? uint64_t{1} + static_cast<uint64_t>(*value) : 0;
  } else {
    return static_cast<uint64_t>(value);
  }
}

template <class... T>
void Append(CudaGraphKey& key, const T&... values) {
  (key.push_back(WordOf(values)), ...);
}

// The bindings below name every member: another one does not compile until it is in the key, too.
void AppendGemm(CudaGraphKey& key, const CudaGroupedGemmParams& params) {
  const auto& [num_experts, rows, rows_dtype, expert_offsets, expert_num_tokens,
               max_rows_per_expert, weights, weight_dtype, n, k, row_scales, weight_scales, bias,
               fuse_silu_mul, output, output_dtype, reserved_multiprocessors, tile, workspace,
               workspace_bytes] = params;
  Append(key, num_experts, rows, rows_dtype, expert_offsets, expert_num_tokens, max_rows_per_expert,
         weights, weight_dtype, n, k, row_scales, weight_scales, bias, fuse_silu_mul, output,
         output_dtype, reserved_multiprocessors, tile, workspace, workspace_bytes);
}

void AppendLayout(CudaGraphKey& key, const RowLayout& layout) {
  const auto& [num_rows, num_local_experts, expert_offsets, max_rows_per_expert,
               expert_num_tokens] = layout;
  Append(key, num_rows, num_local_experts, expert_offsets, max_rows_per_expert, expert_num_tokens);
}

void AppendQuantize(CudaGraphKey& key, const CudaQuantizeRowsParams& params) {
  const auto& [rows, rows_dtype, layout, hidden_size, scheme, output, scales] = params;
  Append(key, rows, rows_dtype, hidden_size, scheme, output, scales);
  AppendLayout(key, layout);
}

void AppendActivation(CudaGraphKey& key, const CudaGatedActivationParams& params) {
  const auto& [gate_up, gate_up_dtype, layout, intermediate_size, activation, alpha, limit, bias,
               output, output_dtype, output_scales] = params;
  Append(key, gate_up, gate_up_dtype, intermediate_size, activation, alpha, limit, bias, output,
         output_dtype, output_scales);
  AppendLayout(key, layout);
}

}  // namespace

absl::Status LaunchFfn(const CudaFfnLaunch& launch, cudaStream_t stream, int32_t device_index) {
  const auto multiply = launch.masked ? LaunchMaskedGroupedGemm : LaunchGroupedGemm;
  absl::Status status;
  if (launch.gate_up.rows_dtype == DType::kFloat8E4M3) {
    status = CudaStatus(LaunchQuantizeRows(launch.quantize, stream), "quantization of rows",
                        device_index);
  }
  if (status.ok()) {
    status = CudaStatus(multiply(launch.gate_up, stream), "grouped GEMM of w13", device_index);
  }
  if (status.ok() && !launch.gate_up.fuse_silu_mul) {
    status = CudaStatus(LaunchGatedActivation(launch.activation, stream), "gated activation",
                        device_index);
  }
  if (!status.ok()) return status;
  return CudaStatus(multiply(launch.down, stream), "grouped GEMM of w2", device_index);
}

CudaGraphKey FfnGraphKey(const CudaFfnLaunch& launch) {
  CudaGraphKey key;
  key.reserve(80);
  const auto& [masked, quantize, gate_up, activation, down] = launch;
  Append(key, masked);
  AppendQuantize(key, quantize);
  AppendGemm(key, gate_up);
  AppendActivation(key, activation);
  AppendGemm(key, down);
  return key;
}

}  // namespace expertmesh
