#ifndef EXPERTMESH_TESTS_SERVER_PLANNING_RANDOM_ROUTING_H_
#define EXPERTMESH_TESTS_SERVER_PLANNING_RANDOM_ROUTING_H_

#include <cstdint>
#include <random>
#include <vector>

#include "server/model/placement.h"
#include "server/planning/step_plan.h"

namespace expertmesh {

// Routing with everything that a client may send: skew, experts that no one chooses, the same id
// twice in a row, -1 (with a NaN weight beside it, which must not be read), tokens with no expert.
struct RandomRouting {
  int32_t topk = 0;
  std::vector<int32_t> topk_ids;
  std::vector<float> topk_weights;

  int64_t num_tokens() const { return static_cast<int64_t>(topk_ids.size()) / topk; }
  RoutingSegment Segment(int64_t first_token, int64_t num_tokens) const;
};

RandomRouting MakeRandomRouting(std::mt19937_64& random, int64_t num_tokens, int32_t topk,
                                int32_t num_experts);

// Cuts the routing into segments at random places, some of them empty.
std::vector<RoutingSegment> CutIntoSegments(std::mt19937_64& random, const RandomRouting& routing);

// Any owners; with few experts some ranks get none.
Placement MakeRandomPlacement(std::mt19937_64& random, int32_t num_experts, int32_t ep_size);

// [ep_size], adding up to num_tokens, some of them 0.
std::vector<int64_t> MakeRandomShardSizes(std::mt19937_64& random, int64_t num_tokens,
                                          int32_t ep_size);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_PLANNING_RANDOM_ROUTING_H_
