#ifndef EXPERTMESH_SERVER_MODEL_SYNTHETIC_TENSOR_H_
#define EXPERTMESH_SERVER_MODEL_SYNTHETIC_TENSOR_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace expertmesh {

// Which tensor of a synthetic model.
enum class SyntheticPart : uint8_t {
  kGate,
  kUp,
  kDown,
  kGateBias,
  kUpBias,
  kDownBias,
  kRouter,
  kRouterBias,
  kCorrectionBias,
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kSharedExpertGate,
};

struct SyntheticTensorId {
  uint64_t seed = 0;
  int32_t layer_index = 0;
  int32_t expert_id = 0;  // 0 for tensors that belong to no expert
  SyntheticPart part = SyntheticPart::kGate;
};

// Standard deviation that keeps a product's outputs as large as its inputs: 1 / sqrt(fan_in).
float SyntheticStddev(int64_t fan_in);

// Fills out[count] of float32, float16 or bfloat16 with uniform random numbers of mean 0. They
// depend on the arguments alone: element i of a shorter tensor is element i of a longer one.
void FillSyntheticTensor(const SyntheticTensorId& id, float stddev, DType dtype, int64_t count,
                         std::byte* out);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_SYNTHETIC_TENSOR_H_
