#ifndef EXPERTMESH_SERVER_PLANNING_SLOT_COUNTER_H_
#define EXPERTMESH_SERVER_PLANNING_SLOT_COUNTER_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/model/placement.h"
#include "server/planning/owner_set.h"
#include "server/planning/step_plan.h"

namespace expertmesh {

// Fills one source rank's slots, of which there are `max_num_tokens` for each owner, token by
// token. Rows for the source itself take slots too, though they do not travel: so whether tokens
// fit does not depend on which rank is their source, and whatever fits still does when tokens
// between them are left out (a replayed step).
class SlotCounter {
 public:
  SlotCounter(const Placement& placement, int64_t max_num_tokens);

  // False, and nothing has changed, when a slot is missing. The first token of a shard always fits.
  // Ids outside [0, num_experts) count for nothing.
  bool Add(const int32_t* topk_ids, int32_t topk);
  void StartNextShard();

 private:
  const Placement& placement_;
  const int64_t max_num_tokens_;
  std::vector<int64_t> used_;  // [ep_size]
  OwnerSet owners_;
  std::vector<int32_t> token_owners_;
};

// Slots that a step exchanges, of `max_num_tokens` (at least 1) at most: the smallest power of two,
// or max_num_tokens itself, that holds as many rows as the largest of these shards has tokens, so
// that a small step moves little and few sizes occur. Pure. Depends on the routing no more than
// shards of CutShardsToSlots do: those are cut by it only where even ones do not fit, and then some
// shard has more than max_num_tokens tokens either way.
int64_t SlotBucket(absl::Span<const int64_t> shard_offsets, int64_t max_num_tokens);

// The shards (as StepPlan::shard_offsets) of kAllToAllFixedCapacity: those of `even_offsets` when
// all of them fit their slots; else each as long as it can be, the first ones first. Empty when not
// even that makes the tokens fit.
std::vector<int64_t> CutShardsToSlots(absl::Span<const RoutingSegment> segments,
                                      const Placement& placement, int64_t max_num_tokens,
                                      std::vector<int64_t> even_offsets);

// Whether these shards fit their slots.
bool ShardsFitSlots(absl::Span<const RoutingSegment> segments, const Placement& placement,
                    int64_t max_num_tokens, absl::Span<const int64_t> shard_offsets);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_PLANNING_SLOT_COUNTER_H_
