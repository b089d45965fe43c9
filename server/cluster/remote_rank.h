#ifndef EXPERTMESH_SERVER_CLUSTER_REMOTE_RANK_H_
#define EXPERTMESH_SERVER_CLUSTER_REMOTE_RANK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/cluster/epoch_end.h"
#include "server/cluster/rank_client.h"

namespace expertmesh {

// What ranks on GPUs have beyond the time in which ranks find each other, for NCCL to connect them:
// seconds, where there are many.
inline constexpr absl::Duration kDeviceConnectTimeout = absl::Seconds(30);

// A rank in another process, which forms its communicators itself. Nothing here blocks or calls
// back into the caller before it returns (RunStep may: an error is known at once); what the rank
// answers comes to RemoteExpertGroup. Thread safe, but commands go out in the order of the calls.
// Abort ends the rank's part of the epoch's running step with the step's `done`, not the epoch.
class RemoteRank : public RankClient {
 public:
  // Whether RunStep can pass this on to the rank, for no rank may get its part of a step that
  // another one cannot get. Its error is the step's.
  virtual absl::Status CheckStep(const StepSlice& slice, const TokenShard& shard) const = 0;
  // Answered by RemoteExpertGroup::OnEpochReady.
  virtual void EnterEpoch(uint64_t incarnation, uint64_t epoch, absl::Duration form_timeout,
                          absl::Duration operation_timeout) = 0;
  // Answered by RemoteExpertGroup::OnEpochDown.
  virtual void EndEpoch(uint64_t epoch, const EpochEnd& end) = 0;
  // No step has this place in the epoch's order of collectives.
  virtual void SkipOrder(uint64_t incarnation, uint64_t epoch, int64_t order) = 0;
  // Ends the stream; running steps are done with UNAVAILABLE.
  virtual void Close(const absl::Status& reason) = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_REMOTE_RANK_H_
