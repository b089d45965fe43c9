#ifndef EXPERTMESH_SERVER_CLUSTER_RUNNING_STEP_H_
#define EXPERTMESH_SERVER_CLUSTER_RUNNING_STEP_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/ops/clock.h"
#include "server/rank/rank_engine.h"

namespace expertmesh {

// Where the results of one step's ranks, or its epoch's end, arrive. Thread safe.
class RunningStep {
 public:
  // `on_decided`, which may be null, is called once, with a lock held that is_decided() does not
  // take, when that has become true; not after Wait has returned.
  RunningStep(int32_t ep_size, absl::AnyInvocable<void()> on_decided)
      : results_(ep_size, absl::UnknownError("no answer yet")),
        has_answered_(ep_size),
        num_missing_(ep_size),
        on_decided_(std::move(on_decided)) {}

  void OnDone(int32_t ep_rank, absl::StatusOr<RankStepResult> result);
  // The epoch ended.
  void OnLost(const absl::Status& reason);

  bool is_decided() const { return is_decided_.load(std::memory_order_acquire); }

  // Once. Blocks until the step is decided or `deadline`. [ep_size] results, or: the first error
  // that is a rank's own; why the epoch ended; DEADLINE_EXCEEDED; STEP_LOST for what ranks say of
  // each other.
  absl::StatusOr<std::vector<RankStepResult>> Wait(Clock& clock, absl::Time deadline);

 private:
  // With mutex_, both.
  void Decide();
  std::string LateText() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<absl::StatusOr<RankStepResult>> results_;  // [ep_size]
  std::vector<bool> has_answered_;                       // [ep_size]
  int32_t num_missing_;
  absl::Status own_error_;    // first one that is a rank's own
  absl::Status peers_error_;  // first one that another rank caused
  absl::Status lost_;         // the epoch ended
  absl::AnyInvocable<void()> on_decided_;
  std::atomic<bool> is_decided_{false};
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_RUNNING_STEP_H_
