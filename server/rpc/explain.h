#ifndef EXPERTMESH_SERVER_RPC_EXPLAIN_H_
#define EXPERTMESH_SERVER_RPC_EXPLAIN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "expertmesh/v1/expert_service.pb.h"
#include "server/model/placement.h"
#include "server/planning/step_plan.h"
#include "server/routing/router_table.h"
#include "server/rpc/forward_validation.h"

namespace expertmesh {

// A call's experts, as control/ would find them.
struct RoutedForward {
  RoutingSegment segment;  // points into the call, or into:
  std::vector<int32_t> ids;
  std::vector<float> weights;
};
// `routers` are not used with given top-k. Errors are RouteCall's.
absl::StatusOr<RoutedForward> RouteForward(const ForwardCall& call, const RouterTable* routers);

struct ExplainParams {
  const ValidForward* forward = nullptr;
  const RouterTable* routers = nullptr;  // not used with given top-k
  const Placement* placement = nullptr;
  uint64_t epoch = 0;
  int32_t max_tokens = 0;  // as ExplainRequest gives it
  // As control/ splits requests.
  int64_t max_step_tokens = 0;
  int64_t max_rank_pairs = 0;
  int64_t max_num_tokens = 0;  // of kAllToAllFixedCapacity
  bool remote_ranks = false;
};

// Routes and plans as control/ would for this request alone, and runs nothing. Takes the time of
// routing and planning. INVALID_ARGUMENT (max_tokens, NaN logits).
absl::StatusOr<v1::ExplainResponse> ExplainForward(const ExplainParams& params);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_EXPLAIN_H_
