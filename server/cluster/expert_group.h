#ifndef EXPERTMESH_SERVER_CLUSTER_EXPERT_GROUP_H_
#define EXPERTMESH_SERVER_CLUSTER_EXPERT_GROUP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
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

// A step that its ranks run. Must be finished.
class StepInFlight {
 public:
  virtual ~StepInFlight() = default;
  // Finish would not block. Any thread.
  virtual bool is_decided() const = 0;
  // Once. Blocks until the step has ended on all ranks, its epoch has ended or
  // its deadline has passed; errors as ExpertGroup::RunStep.
  virtual absl::StatusOr<GroupStepResult> Finish() = 0;
};

// One expert-parallel group as the control plane sees it: ep_size ranks that
// run one step at a time, or as many as the group has lanes.
class ExpertGroup {
 public:
  virtual ~ExpertGroup() = default;
  virtual int32_t ep_size() const = 0;
  // Its ranks are other processes, reached over a link.
  virtual bool is_remote() const { return false; }
  // Random per control-plane process; epoch 0: there is none yet.
  virtual uint64_t incarnation() const = 0;
  virtual uint64_t epoch() const = 0;
  // Of all its ranks' kernels; empty where no rank has said yet. Thread safe.
  virtual std::string instruction_set() const { return ""; }
  // Of a model's weights, as all its ranks hold them; kInvalid where no rank
  // has said yet. Thread safe.
  virtual DType weight_dtype(std::string_view /*model*/) const { return DType::kInvalid; }
  // For people: what an epoch waits for, while there is none. Thread safe; takes no lock that is
  // held while the group calls out.
  virtual std::string WhyNoEpoch() const { return "not all ranks are there"; }
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

  // How many steps may be in flight: with 1, RunStep is all there is.
  virtual int32_t max_lanes() const { return 1; }
  // Gives the step to its ranks and returns; by one thread at a time, as
  // RunStep. Steps end in the order in which they were started. `has_follower`
  // promises another StartStep, whatever becomes of this one: its rows are on
  // their way while this step's experts compute, so this step ends only after
  // that one has started, or SkipFollower was called. Only with two lanes or
  // more, and with what will be started or skipped as soon as there is a free
  // one, without waiting for anything else. `on_decided` is called once, from
  // any thread and maybe before this returns, when is_decided() has become
  // true; not after Finish has returned. It must not block or call back.
  virtual absl::StatusOr<std::unique_ptr<StepInFlight>> StartStep(
      // NOLINTNEXTLINE(performance-unnecessary-value-param): those with lanes keep it
      GroupStep /*step*/, bool /*has_follower*/, absl::Time /*step_deadline*/,
      absl::AnyInvocable<void()> /*on_decided*/) {
    return absl::UnimplementedError("this group has one lane");
  }
  // The promised step does not come. Nothing when there was no promise.
  virtual void SkipFollower() {}
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_EXPERT_GROUP_H_
