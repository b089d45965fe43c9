#include "tests/gpu/routed_experts.h"

#include <cstddef>
#include <numeric>
#include <random>
#include <utility>

namespace expertmesh {

std::vector<int32_t> RoutedExperts(int64_t num_experts, int64_t num_tokens, int64_t topk) {
  std::mt19937_64 random(61);
  std::vector<int32_t> experts(static_cast<size_t>(num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  std::vector<int32_t> routed;
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (size_t k = 0; k < static_cast<size_t>(topk); ++k) {
      std::uniform_int_distribution<size_t> uniform(k, experts.size() - 1);
      std::swap(experts[k], experts[uniform(random)]);
      routed.push_back(experts[k]);
    }
  }
  return routed;
}

std::vector<int64_t> RoutedOffsets(int64_t num_experts, int64_t num_tokens, int64_t topk) {
  std::vector<int64_t> offsets(static_cast<size_t>(num_experts) + 1, 0);
  for (const int32_t expert : RoutedExperts(num_experts, num_tokens, topk)) {
    ++offsets[static_cast<size_t>(expert) + 1];
  }
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
  return offsets;
}

}  // namespace expertmesh
