#include "kernels/cuda/cuda_ffn_launch.h"

#include "kernels/cuda/cuda_status.h"

namespace expertmesh {

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

}  // namespace expertmesh
