#ifndef EXPERTMESH_TESTS_SERVER_CLUSTER_RANDOM_MOE_H_
#define EXPERTMESH_TESTS_SERVER_CLUSTER_RANDOM_MOE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/cluster/expert_group.h"
#include "server/cluster/local_expert_group.h"
#include "server/model/weight_source.h"
#include "tests/reference/reference_moe.h"
#include "tests/server/planning/random_routing.h"

namespace expertmesh {

struct RandomMoeShape {
  int64_t hidden_size = 1;
  int64_t intermediate_size = 1;
  int32_t num_experts = 1;
  int32_t topk = 1;
  DType weight_dtype = DType::kFloat32;
  Activation activation = Activation::kSiluMul;
  int64_t shared_intermediate_size = 0;
  bool shared_gated = false;
};

// A model of one MoE layer (index 3) named "random", and its weights for the reference.
struct RandomMoe {
  RandomMoe(const RandomMoeShape& moe_shape, uint64_t seed);

  RandomMoeShape shape;
  std::unique_ptr<WeightSource> source;
  ReferenceExperts reference;
  ReferenceExperts shared_reference;  // one expert, if there are shared ones
  std::vector<double> shared_gate;    // [hidden_size], or empty: not gated
};

// Memory filled with 0xff (NaN), so that bytes that were never written show.
std::shared_ptr<Allocator> PoisonedMemory();

// A loaded group in poisoned memory; fails the test if loading does.
std::unique_ptr<LocalExpertGroup> LoadGroup(const RandomMoe& moe, LocalExpertGroupOptions options);

// Tokens with routing. Hidden rows without an expert are NaN and must not be read, but for a model
// with shared experts.
struct RandomTokens {
  RandomTokens(const RandomMoe& moe, int64_t num_tokens, DType dtype, uint64_t seed);

  int64_t num_tokens() const { return routing.num_tokens(); }

  RandomRouting routing;
  DType activation_dtype;
  std::vector<double> hidden_values;  // [num_tokens, hidden_size]
  std::vector<std::byte> hidden;      // the same in activation_dtype, from byte 1 on: unaligned
};

// What the tests vary about a step and what must not change the bytes of a token.
struct StepChoices {
  CombineMode combine = CombineMode::kSum;
  DispatchMode strategy = DispatchMode::kAuto;
  bool weight_on_input = false;
  bool include_shared_experts = false;
  DType combine_dtype = DType::kFloat32;
  DType output_dtype = DType::kFloat32;
  std::vector<int64_t> tokens;       // of RandomTokens, in this order; empty: all
  std::vector<int64_t> shard_sizes;  // empty: equal
  int64_t max_num_tokens = 0;        // kAllToAllFixedCapacity; 0: the least that always fits
  bool on_caller = true;
};

// One step. OK: a token's output bytes each, in the order of StepChoices::tokens.
absl::StatusOr<std::vector<std::vector<std::byte>>> RunTokens(ExpertGroup& group,
                                                              const RandomMoe& moe,
                                                              const RandomTokens& tokens,
                                                              const StepChoices& choices);

// The step's parts, for tests that spoil them. The hidden states are copied to the group's memory,
// which `memory` keeps.
absl::StatusOr<GroupStep> MakeStep(ExpertGroup& group, const RandomMoe& moe,
                                   const RandomTokens& tokens, const StepChoices& choices,
                                   std::vector<std::vector<std::byte>>* memory);

// Fails the test where an output (of all tokens) is further from the float64 reference than the
// roundings that the step makes can explain.
void ExpectNearReference(const RandomMoe& moe, const RandomTokens& tokens,
                         const StepChoices& choices,
                         const std::vector<std::vector<std::byte>>& outputs);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_CLUSTER_RANDOM_MOE_H_
