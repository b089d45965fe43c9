#ifndef EXPERTMESH_TESTS_GPU_ROUTED_EXPERTS_H_
#define EXPERTMESH_TESTS_GPU_ROUTED_EXPERTS_H_

#include <cstdint>
#include <vector>

namespace expertmesh {

// [num_tokens, topk]: different experts for each token, drawn evenly; always the same ones.
std::vector<int32_t> RoutedExperts(int64_t num_experts, int64_t num_tokens, int64_t topk);

// [num_experts + 1]: where their rows begin when they are sorted by expert.
std::vector<int64_t> RoutedOffsets(int64_t num_experts, int64_t num_tokens, int64_t topk);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_ROUTED_EXPERTS_H_
