#ifndef EXPERTMESH_SERVER_CLUSTER_EXPERT_GROUP_H_
#define EXPERTMESH_SERVER_CLUSTER_EXPERT_GROUP_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/buffer.h"
#include "server/model/placement.h"
#include "server/planning/step_plan.h"
#include "server/rank/token_shard.h"

namespace expertmesh {

struct GroupStep {
  StepPlan plan;
  std::vector<TokenShard> shards;  // [ep_size]
};

struct GroupStepResult {
  std::vector<ShardOutput> shards;  // [ep_size]
  // Of the rank that computed longest, so that the stages of a step do not overlap.
  StepTimings timings;
};

// One expert-parallel group as the control plane sees it: ep_size ranks that
// run one step at a time.
class ExpertGroup {
 public:
  virtual ~ExpertGroup() = default;
  virtual int32_t ep_size() const = 0;
  // Its ranks are other processes, reached over a link.
  virtual bool is_remote() const { return false; }
  // Random per control-plane process; epoch 0: there is none yet.
  virtual uint64_t incarnation() const = 0;
  virtual uint64_t epoch() const = 0;
  // Placement of one layer's experts; null for a model or layer that it does
  // not hold. Valid as long as the group.
  virtual const Placement *placement(std::string_view model, int32_t layer) const = 0;
  // Where request payloads should live (pinned memory when ranks are GPUs).
  // Thread safe.
  virtual Allocator *request_allocator() = 0;

  // Blocking; one call at a time. Every slice carries the current (incarnation,
  // epoch). `on_caller` asks to run all ranks in turn on the calling thread
  // (small steps: a hand-off costs more than the work), else every rank runs on
  // its own thread. UNAVAILABLE (STEP_LOST) when a rank was lost,
  // DEADLINE_EXCEEDED after `step_deadline`: in both cases the step may be
  // replayed with a later epoch; anything else is a failure of the step itself.
  virtual absl::StatusOr<GroupStepResult> RunStep(GroupStep step, bool on_caller,
                                                  absl::Time step_deadline) = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_EXPERT_GROUP_H_
