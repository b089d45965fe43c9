#include "server/rpc/expert_load.h"

#include <algorithm>

namespace expertmesh {
namespace {

struct BusyExpert {
  int64_t tokens = 0;
  int32_t layer = 0;
  int32_t expert_id = 0;
  // The busiest first; equal ones by number, so that which series there are does not flicker.
  friend bool operator<(const BusyExpert& a, const BusyExpert& b) {
    if (a.tokens != b.tokens) return a.tokens > b.tokens;
    return std::pair(a.layer, a.expert_id) < std::pair(b.layer, b.expert_id);
  }
};

}  // namespace

void ExpertLoad::Count(std::string_view model, int32_t layer,
                       absl::Span<const int64_t> tokens_per_expert) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto found = models_.find(model);
  if (found == models_.end()) found = models_.try_emplace(std::string(model)).first;
  std::vector<int64_t>& sums = found->second[layer];
  sums.resize(std::max(sums.size(), tokens_per_expert.size()));
  for (size_t expert = 0; expert < tokens_per_expert.size(); ++expert) {
    sums[expert] += tokens_per_expert[expert];
  }
}

MetricFamily ExpertLoad::Top(size_t max_series) const {
  MetricFamily family;
  family.name = "expertmesh_expert_tokens";
  family.help =
      "Tokens routed to an expert in steps that ended well, since the start: the busiest experts, "
      "and all others together (layer and expert are \"rest\"). An expert may leave for the rest, "
      "so these are no counters; their sum is one";
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [model, layers] : models_) {
    std::vector<BusyExpert> experts;
    int64_t rest = 0;
    for (const auto& [layer, sums] : layers) {
      for (size_t expert = 0; expert < sums.size(); ++expert) {
        rest += sums[expert];
        if (sums[expert] > 0) {
          experts.push_back({sums[expert], layer, static_cast<int32_t>(expert)});
        }
      }
    }
    const size_t num_shown = std::min(max_series, experts.size());
    std::partial_sort(experts.begin(), experts.begin() + static_cast<ptrdiff_t>(num_shown),
                      experts.end());
    for (size_t i = 0; i < num_shown; ++i) {
      rest -= experts[i].tokens;
      family.samples.push_back({{{"model", model},
                                 {"layer", std::to_string(experts[i].layer)},
                                 {"expert", std::to_string(experts[i].expert_id)}},
                                static_cast<double>(experts[i].tokens)});
    }
    family.samples.push_back(
        {{{"model", model}, {"layer", "rest"}, {"expert", "rest"}}, static_cast<double>(rest)});
  }
  return family;
}

}  // namespace expertmesh
