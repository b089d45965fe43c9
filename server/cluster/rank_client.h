#ifndef EXPERTMESH_SERVER_CLUSTER_RANK_CLIENT_H_
#define EXPERTMESH_SERVER_CLUSTER_RANK_CLIENT_H_

#include <cstdint>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/buffer.h"
#include "server/planning/step_plan.h"
#include "server/rank/rank_engine.h"
#include "server/rank/token_shard.h"

namespace expertmesh {

// How the control plane reaches one rank. Functions by one thread at a time, except Abort.
class RankClient {
 public:
  using StepDone = absl::AnyInvocable<void(absl::StatusOr<RankStepResult>)>;

  virtual ~RankClient() = default;
  virtual int32_t ep_rank() const = 0;
  // Where request payloads for this rank should live (AllocateHost: pinned where the rank is a
  // GPU).
  virtual Allocator* host_allocator() = 0;

  // Starts the rank's part of a step and returns; one step at a time, or kMaxLanes where their
  // headers give their collectives places. Collective: every rank of the
  // group must be given its slice of the same step. `done` is called once, from any thread, with
  // what RankEngine::RunStep returns, or UNAVAILABLE when the rank was lost. Until then the shard's
  // memory stays with the caller.
  virtual void RunStep(StepSlice slice, TokenShard shard, absl::Time deadline, StepDone done) = 0;

  // Ends a step in progress on every rank of the epoch. Any thread; does not wait for `done`.
  virtual void Abort(const absl::Status& reason) = 0;
};

// A rank of this process. Steps run on a thread of its own. `engine` must outlive the client; while
// no step is in progress its owner may use it directly.
std::unique_ptr<RankClient> NewInProcessRankClient(RankEngine* engine);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_RANK_CLIENT_H_
