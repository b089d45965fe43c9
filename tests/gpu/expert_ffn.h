#ifndef EXPERTMESH_TESTS_GPU_EXPERT_FFN_H_
#define EXPERTMESH_TESTS_GPU_EXPERT_FFN_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/cuda/grouped_gemm.h"
#include "tests/gpu/bench_context.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/random_pattern.h"

namespace expertmesh {

struct FfnShape {
  DType dtype = DType::kInvalid;  // of rows and weights: bfloat16 or float8_e4m3
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  std::vector<int64_t> expert_offsets;  // [num_experts + 1]
};

// The values of one element type's tensors, whatever their shapes: seconds to make.
struct FfnPatterns {
  explicit FfnPatterns(DType dtype);

  RandomPattern rows;
  RandomPattern w13;
  RandomPattern w2;
  RandomPattern row_scales;
  RandomPattern w13_scales;
  RandomPattern w2_scales;
};

// The FFN of random experts on random rows, kernel by kernel, on one stream. One at a time.
class ExpertFfn {
 public:
  // `patterns` of the shape's dtype, which must outlive it.
  ExpertFfn(const FfnShape& shape, const FfnPatterns& patterns);

  // Each enqueues and returns the launch's error. The FFN is gate_up, activation (float8: to float8
  // with scales) and down; fused, which float8 cannot be, the first product does the activation
  // itself, with w13's rows taken as interleaved. Float8 rows are given as such: what quantizing
  // them takes stands among the figures of rows.
  cudaError_t LaunchGateUp(cudaStream_t stream);
  cudaError_t LaunchFusedGateUp(cudaStream_t stream);  // the fused FFN's first product
  cudaError_t LaunchFfn(cudaStream_t stream);
  cudaError_t LaunchFusedFfn(cudaStream_t stream);
  // The two products as one cuBLAS call per expert with rows, bfloat16 alone.
  cudaError_t LaunchCublasLoop(CublasLibrary* cublas, bool with_activation, cudaStream_t stream);

  // Of sampled outputs, which must have been computed and waited for, against float64 on the host.
  double GateUpError() const;
  double OutputError(bool fused) const;

  std::byte* rows() const { return rows_->data(); }
  const std::byte* output() const { return output_->data(); }  // [num_rows, hidden_size] float32

  void set_tile(std::optional<GemmTile> tile) { tile_ = tile; }
  // From then on the products take their counts from the device, where LaunchCounts puts them: rows
  // are taken as batched, and each expert must have as many.
  void UseDeviceCounts();
  cudaError_t LaunchCounts(cudaStream_t stream) const;
  int32_t num_experts() const { return static_cast<int32_t>(shape_.expert_offsets.size()) - 1; }
  int64_t num_rows() const { return shape_.expert_offsets.back(); }
  int64_t num_active_experts() const;
  // Operations of the products: a multiplication and an addition each.
  double gate_up_flop() const;
  double down_flop() const;
  // What each product must read and write at least.
  double gate_up_bytes() const;
  double down_bytes() const;

 private:
  bool is_float8() const { return shape_.dtype == DType::kFloat8E4M3; }
  CudaGroupedGemmParams Gemm(int64_t n, int64_t k) const;
  static cudaError_t Multiply(const CudaGroupedGemmParams& params, cudaStream_t stream);
  cudaError_t LaunchW13(bool fused, cudaStream_t stream);
  cudaError_t LaunchActivation(cudaStream_t stream);
  cudaError_t LaunchDown(cudaStream_t stream);
  std::vector<int64_t> SampledRows() const;
  int64_t ExpertOf(int64_t row) const;
  float RowScale(int64_t row, int64_t i) const;
  float WeightScale(const RandomPattern& scales, int64_t expert, int64_t n, int64_t k, int64_t row,
                    int64_t i) const;
  // One output column of gate_up for one row.
  double GateUp(int64_t row, int64_t column) const;

  FfnShape shape_;
  std::optional<GemmTile> tile_;
  const FfnPatterns& patterns_;
  std::unique_ptr<DeviceMemory> rows_, row_scales_, w13_, w13_scales_, w2_, w2_scales_;
  std::unique_ptr<DeviceMemory> gate_up_, intermediate_, quantized_, quantized_scales_, output_;
  std::unique_ptr<DeviceMemory> workspace_;
  std::unique_ptr<DeviceMemory> counts_;  // null: the host's offsets
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_EXPERT_FFN_H_
