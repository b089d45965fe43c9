#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_EXPERT_WEIGHTS_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_EXPERT_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/buffer.h"
#include "kernels/cuda/cuda_allocator.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/grouped_gemm.h"
#include "kernels/expert_kernels.h"

namespace expertmesh {

// The experts of one layer in the memory of a GPU, row-major:
//   w13 [num_local_experts, 2 * intermediate_size, hidden_size]   gate rows, then up rows; or,
//   where
//       the first product can do the activation itself, as CudaGroupedGemmParams wants them for
//       that
//   w2  [num_local_experts, hidden_size, intermediate_size]
// Both with their scales when they are float8. Different experts may be loaded from different
// threads.
class CudaExpertWeights {
 public:
  // What the weights and scales will take, biases aside: known before anything is allocated.
  // RESOURCE_EXHAUSTED when that overflows 64 bits, INVALID_ARGUMENT for the shape.
  static absl::StatusOr<int64_t> SizeBytes(const ExpertLayerShape& shape);
  // Allocates all of it. RESOURCE_EXHAUSTED, with what is needed and what is free.
  static absl::StatusOr<std::unique_ptr<CudaExpertWeights>> Create(
      const ExpertLayerShape& shape, const CudaAllocators& allocators,
      std::shared_ptr<CudaStreamPool> streams);

  // Packs one expert through pinned memory, copies every byte back and compares: DATA_LOSS when it
  // came out another. Blocking.
  absl::Status Load(int32_t local_expert_id, const ExpertWeights& weights);

  // Whether w13 and its biases lie as a fused product wants them: a matter of the shape alone.
  bool is_fused() const;
  int64_t size_bytes() const;  // on the device, biases included
  const std::byte* w13() const { return w13_.data(); }
  const std::byte* w2() const { return w2_.data(); }
  // float8: [num_local_experts, 2 * intermediate_size / 128, ceil(hidden_size / 128)] and
  // [num_local_experts, ceil(hidden_size / 128), intermediate_size / 128]; else null.
  const float* w13_scales() const { return reinterpret_cast<const float*>(w13_scales_.data()); }
  const float* w2_scales() const { return reinterpret_cast<const float*>(w2_scales_.data()); }
  // [num_local_experts, 2 * intermediate_size] and [num_local_experts, hidden_size], zeros where an
  // expert has none; null when no expert has any.
  const float* w13_bias() const { return reinterpret_cast<const float*>(w13_bias_.data()); }
  const float* w2_bias() const { return reinterpret_cast<const float*>(w2_bias_.data()); }

 private:
  int64_t GateRow(int64_t i) const { return is_fused() ? GateWeightRow(i) : i; }
  int64_t UpRow(int64_t i) const {
    return is_fused() ? UpWeightRow(i) : shape_.intermediate_size + i;
  }

  CudaExpertWeights(const ExpertLayerShape& shape, const CudaAllocators& allocators,
                    std::shared_ptr<CudaStreamPool> streams)
      : shape_(shape), allocators_(allocators), streams_(std::move(streams)) {}

  absl::Status LoadScales(int32_t local_expert_id, const ExpertWeights& weights);
  absl::Status LoadBias(const float* bias, int64_t first, int64_t count, int64_t total_count,
                        Buffer* biases);

  const ExpertLayerShape shape_;
  const CudaAllocators allocators_;
  const std::shared_ptr<CudaStreamPool> streams_;
  Buffer w13_;
  Buffer w2_;
  Buffer w13_scales_;
  Buffer w2_scales_;
  mutable std::mutex bias_mutex_;
  Buffer w13_bias_;
  Buffer w2_bias_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_EXPERT_WEIGHTS_H_
