#ifndef EXPERTMESH_SERVER_CLUSTER_REMOTE_EXPERT_GROUP_H_
#define EXPERTMESH_SERVER_CLUSTER_REMOTE_EXPERT_GROUP_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/buffer.h"
#include "server/cluster/collective_order.h"
#include "server/cluster/direct_step.h"
#include "server/cluster/expert_group.h"
#include "server/cluster/group_usage.h"
#include "server/cluster/membership.h"
#include "server/cluster/refusal_log.h"
#include "server/cluster/remote_rank.h"
#include "server/cluster/running_step.h"
#include "server/comm/in_memory_rendezvous_store.h"
#include "server/model/model_spec.h"
#include "server/model/placement.h"
#include "server/ops/clock.h"

namespace expertmesh {

struct RemoteExpertGroupOptions {
  int32_t ep_size = 1;
  absl::Duration heartbeat_timeout = absl::Seconds(5);
  absl::Duration form_timeout = absl::Seconds(10);
  absl::Duration teardown_timeout = absl::Seconds(10);
  absl::Duration step_timeout = absl::Seconds(30);  // for one operation of the communicator
  std::shared_ptr<Allocator> allocator;             // host memory; default: a HostBufferPool
};

// The group whose ranks are processes: who they are (Membership), what they are told, and steps
// over all of them. Experts lie in contiguous blocks. Whoever holds the ranks' streams tells it
// what comes from them; all these functions are thread safe and do not block.
class RemoteExpertGroup : public ExpertGroup {
 public:
  // The models' names and fingerprints are what ranks must bring. INVALID_ARGUMENT for ep_size < 1.
  // `clock` outlives the group.
  static absl::StatusOr<std::unique_ptr<RemoteExpertGroup>> Create(
      const RemoteExpertGroupOptions& options, absl::Span<const ModelSpec* const> models,
      Clock* clock);
  ~RemoteExpertGroup() override;

  // Called after every change of epoch(), by whatever thread made it, without locks; must not
  // block. Before anybody joins.
  void SetEpochListener(std::function<void(uint64_t epoch)> listener);

  int32_t ep_size() const override { return options_.ep_size; }
  bool is_remote() const override { return true; }
  uint64_t incarnation() const override { return incarnation_; }
  uint64_t epoch() const override { return epoch_.load(std::memory_order_acquire); }
  const Placement* placement(std::string_view model, int32_t layer) const override;
  // Of the standing epoch, or the last one.
  std::string instruction_set() const override;
  DType weight_dtype(std::string_view model) const override;
  std::string WhyNoEpoch() const override;
  Allocator* request_allocator() override { return options_.allocator.get(); }
  const std::shared_ptr<Allocator>& allocator() const { return options_.allocator; }

  // As ExpertGroup; `on_caller` means nothing here. A step that fails ends its epoch,
  // unless no rank was given its part, or all have done theirs and an output alone was lost.
  absl::StatusOr<GroupStepResult> RunStep(GroupStep step, bool on_caller,
                                          absl::Time step_deadline) override;
  int32_t max_lanes() const override { return kMaxLanes; }
  absl::StatusOr<std::unique_ptr<StepInFlight>> StartStep(
      GroupStep step, bool has_follower, absl::Time step_deadline,
      absl::AnyInvocable<void()> on_decided) override;
  void SkipFollower() override;

  // What comes from ranks; errors as Membership.
  absl::StatusOr<uint64_t> Join(const RankOffer& offer);
  absl::Status Attach(uint64_t incarnation, uint64_t member_id, std::shared_ptr<RemoteRank> rank);
  absl::Status Heartbeat(uint64_t incarnation, uint64_t member_id, int64_t memory_used_bytes);
  absl::Status Announce(const RankAnnouncement& announcement);
  // Who was refused before Join; `address` is for people.
  void NoteRefusal(int32_t ep_rank, const std::string& address, const absl::Status& status);
  void OnEpochReady(uint64_t member_id, uint64_t epoch, const absl::Status& status);
  void OnEpochDown(uint64_t member_id, uint64_t epoch);
  void OnStreamEnded(uint64_t member_id, const absl::Status& reason);
  void OnLeave(uint64_t member_id);

  // STALE_INCARNATION, STALE_EPOCH unless the epoch is forming: only then may ranks use its keys.
  absl::Status CheckForming(uint64_t incarnation, uint64_t epoch) const;
  InMemoryRendezvousStore& rendezvous() { return rendezvous_; }

  std::vector<MemberView> Members() const;  // [ep_size]
  const GroupUsage& usage() const { return usage_; }
  absl::Duration heartbeat_timeout() const { return options_.heartbeat_timeout; }
  absl::Duration step_timeout() const { return options_.step_timeout; }

  // Ends every stream and takes no ranks any more. Steps fail.
  void Close();

 private:
  class Flight;

  RemoteExpertGroup(RemoteExpertGroupOptions options,
                    std::map<std::string, std::map<int32_t, Placement>, std::less<>> placements,
                    MembershipOptions membership_options, Clock* clock);

  absl::StatusOr<std::shared_ptr<RunningStep>> StartOnRanks(GroupStep step, bool has_follower,
                                                            absl::Time step_deadline,
                                                            absl::AnyInvocable<void()> on_decided);
  absl::StatusOr<GroupStepResult> FinishOnRanks(const std::shared_ptr<RunningStep>& run,
                                                const StepHeader& header, absl::Time step_deadline);
  void WatchClock();
  // With `lock` held after a change of membership_: does what follows from it. What it has to tell
  // ranks, waiting store users and the listener is told in order, with the lock released.
  void Act(std::unique_lock<std::mutex>& lock);
  void PlanOrder(const MembershipAction& action);
  // The control plane's own sums of `direct` steps are to be the ranks'.
  void TakeInstructionSet(const std::string& instruction_set);
  void EndEpoch(uint64_t epoch, const absl::Status& reason);

  const RemoteExpertGroupOptions options_;
  const uint64_t incarnation_;
  const std::map<std::string, std::map<int32_t, Placement>, std::less<>> placements_;
  Clock* const clock_;
  std::map<std::string, int64_t, std::less<>> hidden_sizes_;
  GroupUsage usage_;
  std::function<void(uint64_t)> listener_;
  InMemoryRendezvousStore rendezvous_;
  std::atomic<uint64_t> epoch_{0};
  CollectiveOrder order_;  // of whoever starts steps
  RefusalLog refusals_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable clock_cv_;
  Membership membership_;
  std::string instruction_set_;  // of direct_ as well, where this machine has it
  std::map<std::string, DType, std::less<>> weight_dtypes_;  // of the last epoch's ranks
  std::shared_ptr<DirectStep> direct_;
  std::vector<std::shared_ptr<RemoteRank>> ranks_;  // [ep_size], null: no stream
  std::vector<uint64_t> stream_members_;            // [ep_size] whose stream that is
  std::vector<std::shared_ptr<RunningStep>> running_;
  uint64_t forming_epoch_ = 0;
  std::deque<absl::AnyInvocable<void()>> orders_;
  bool acting_ = false;
  bool closed_ = false;

  std::thread clock_thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_REMOTE_EXPERT_GROUP_H_
