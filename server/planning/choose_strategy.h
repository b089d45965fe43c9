#ifndef EXPERTMESH_SERVER_PLANNING_CHOOSE_STRATEGY_H_
#define EXPERTMESH_SERVER_PLANNING_CHOOSE_STRATEGY_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "server/planning/step_plan.h"

namespace expertmesh {

// What a step's strategy may depend on.
struct StepTraffic {
  int32_t ep_size = 1;
  bool remote_ranks = false;  // other processes, reached over a link
  bool include_shared_experts = false;
  int64_t num_tokens = 0;
  int32_t topk = 0;           // of the widest routing
  int64_t bytes_per_row = 0;  // of a row on its way out and of its partial on the way back
};

struct StrategyChoice {
  DispatchMode mode = DispatchMode::kAuto;  // never kAuto
  const char* reason = "";                  // lives for ever
};

// `direct` up to this many bytes to and from the ranks: about what the control plane moves over its
// links in the time of the two exchanges among ranks that it saves.
inline constexpr int64_t kMaxDirectBytes = int64_t{128} << 10;

// The strategy of one step. Pure, constant time. The first line that fits:
//
//   requested        where                                        result
//   kPassthrough     ep_size > 1                                  INVALID_ARGUMENT
//   kDirect          shared experts, which run on a token's       INVALID_ARGUMENT
//                    source: here no rank
//   not kAuto        anywhere                                     as requested
//   kAuto            ep_size 1                                    kPassthrough
//   kAuto            ranks in this process (an exchange is a      kAllToAll
//                    memcpy), or shared experts
//   kAuto            num_tokens * min(topk, ep_size) *            kDirect
//                    bytes_per_row <= kMaxDirectBytes
//   kAuto            anything else                                kAllToAll
//
// Both forms of kAllGatherReduceScatter, and kAllToAllFixedCapacity, never move less than kAllToAll
// between pairs of ranks, so they are only for those who ask. Errors name the field
// options.dispatch.
absl::StatusOr<StrategyChoice> ChooseStrategy(DispatchMode requested, const StepTraffic& traffic);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_PLANNING_CHOOSE_STRATEGY_H_
