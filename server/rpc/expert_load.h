#ifndef EXPERTMESH_SERVER_RPC_EXPERT_LOAD_H_
#define EXPERTMESH_SERVER_RPC_EXPERT_LOAD_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "server/ops/metrics.h"

namespace expertmesh {

// How many tokens went to each expert. Thread safe.
class ExpertLoad {
 public:
  // One step's (token, k) pairs, [num_experts]. One addition for each expert of the layer, none for
  // each token.
  void Count(std::string_view model, int32_t layer, absl::Span<const int64_t> tokens_per_expert);

  // The busiest `max_series` experts of each model by name, over all of its layers, and all its
  // others in one series: as many series as that, however many experts there are.
  MetricFamily Top(size_t max_series) const;

 private:
  using Layers = std::map<int32_t, std::vector<int64_t>>;
  mutable std::mutex mutex_;  // guards what follows
  std::map<std::string, Layers, std::less<>> models_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_EXPERT_LOAD_H_
