#include "tests/server/planning/random_routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace expertmesh {
namespace {

int64_t Uniform(std::mt19937_64& random, int64_t first, int64_t last) {
  return std::uniform_int_distribution<int64_t>(first, last)(random);
}

}  // namespace

RoutingSegment RandomRouting::Segment(int64_t first_token, int64_t num_segment_tokens) const {
  RoutingSegment segment;
  segment.topk_ids = topk_ids.data() + first_token * topk;
  segment.topk_weights = topk_weights.data() + first_token * topk;
  segment.num_tokens = num_segment_tokens;
  segment.topk = topk;
  return segment;
}

RandomRouting MakeRandomRouting(std::mt19937_64& random, int64_t num_tokens, int32_t topk,
                                int32_t num_experts) {
  RandomRouting routing;
  routing.topk = topk;
  // Squaring favours low ids; a limit below num_experts leaves some experts without a token.
  const double skew = Uniform(random, 0, 1) == 0 ? 1.0 : 3.0;
  const int64_t num_used = std::max<int64_t>(1, Uniform(random, num_experts / 2, num_experts));
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  std::normal_distribution<float> weight(0.0f, 0.5f);
  for (int64_t token = 0; token < num_tokens; ++token) {
    const bool no_expert = Uniform(random, 0, 9) == 0;
    for (int32_t k = 0; k < topk; ++k) {
      const bool none = no_expert || Uniform(random, 0, 9) == 0;
      const auto id = static_cast<int32_t>(
          std::min<int64_t>(num_used - 1, std::pow(unit(random), skew) * num_used));
      routing.topk_ids.push_back(none ? -1 : id);
      routing.topk_weights.push_back(none ? std::numeric_limits<float>::quiet_NaN()
                                          : weight(random));
    }
  }
  return routing;
}

std::vector<RoutingSegment> CutIntoSegments(std::mt19937_64& random, const RandomRouting& routing) {
  std::vector<RoutingSegment> segments;
  int64_t token = 0;
  while (token < routing.num_tokens()) {
    const int64_t size = Uniform(random, 0, routing.num_tokens() - token);
    segments.push_back(routing.Segment(token, size));
    token += size;
  }
  return segments;
}

Placement MakeRandomPlacement(std::mt19937_64& random, int32_t num_experts, int32_t ep_size) {
  std::vector<int32_t> owners(num_experts);
  for (int32_t& owner : owners) owner = static_cast<int32_t>(Uniform(random, 0, ep_size - 1));
  return *Placement::FromOwners(std::move(owners), ep_size);
}

std::vector<int64_t> MakeRandomShardSizes(std::mt19937_64& random, int64_t num_tokens,
                                          int32_t ep_size) {
  std::vector<int64_t> cuts = {0, num_tokens};
  for (int32_t i = 1; i < ep_size; ++i) cuts.push_back(Uniform(random, 0, num_tokens));
  std::sort(cuts.begin(), cuts.end());
  std::vector<int64_t> sizes;
  for (int32_t i = 0; i < ep_size; ++i) sizes.push_back(cuts[i + 1] - cuts[i]);
  return sizes;
}

}  // namespace expertmesh
