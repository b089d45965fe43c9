#ifndef EXPERTMESH_TESTS_GPU_BENCH_RANK_STEP_H_
#define EXPERTMESH_TESTS_GPU_BENCH_RANK_STEP_H_

#include <cstdint>

#include "tests/gpu/bench_context.h"

namespace expertmesh {

struct RankStepShape {
  int64_t num_tokens = 64;
  int64_t hidden_size = 2048;
  int64_t intermediate_size = 768;
  int32_t num_experts = 128;
  int32_t topk = 8;
  int num_steps = 300;
};

// A whole step of one rank in bfloat16, from the call to the output in host memory: the time it
// takes, the time of the kernels that it launches (the same ones back to back, without anything
// between them), and what is left, in which the host plans and enqueues and rows cross to the
// device and back. Whether the output is right is not asked here. Aborts when a step fails.
void BenchRankStep(const BenchContext& context, const RankStepShape& shape);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_BENCH_RANK_STEP_H_
