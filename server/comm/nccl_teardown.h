#ifndef EXPERTMESH_SERVER_COMM_NCCL_TEARDOWN_H_
#define EXPERTMESH_SERVER_COMM_NCCL_TEARDOWN_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/comm/communicator.h"
#include "server/comm/deadline_worker.h"
#include "server/comm/nccl_functions.h"
#include "server/comm/nccl_operation.h"

namespace expertmesh {

// How one rank's end of a group of NCCL breaks and ends. It keeps the error that broke it, and a
// thread that waits for one, or for a deadline to pass: the thread that issues may be inside a call
// that does not come back, so it is no clock. That thread then tells the peers and aborts NCCL.
// Thread safe.
class NcclTeardown {
 public:
  struct Params {
    int32_t ep_rank = 0;
    int32_t device_index = 0;
    std::shared_ptr<NcclFunctions> functions;
    NcclFunctions::Comm comm = nullptr;  // stands; taken over, as `stream`
    NcclFunctions::DeviceStream stream = nullptr;
    Communicator* control = nullptr;  // lives until Stop has returned
    absl::Duration operation_timeout;
    absl::Duration abort_timeout;
    std::function<void(const absl::Status&)> on_stuck_abort;
    // Both on the thread, once, in this order: nothing may be issued any more; no buffer is touched
    // any more, or on_stuck_abort has returned.
    std::function<void()> on_broken;
    std::function<void(const absl::Status& broken)> on_torn_down;
  };

  explicit NcclTeardown(Params params);
  ~NcclTeardown();  // after Stop

  // Once. RESOURCE_EXHAUSTED without threads: then only Stop is left.
  absl::Status Begin();

  // OK while it is whole.
  absl::Status broken() const;
  // The first one counts. `reason_for_peers`: OK when they know. Does not wait.
  void Break(const absl::Status& status, const absl::Status& reason_for_peers);
  // After Break: until on_torn_down has been called.
  void WaitUntilTornDown();

  // Of the thread that issues: makes `call`, of NCCL or the device, unless it is broken; returns
  // its status. One that takes longer than operation_timeout breaks with DEADLINE_EXCEEDED. One
  // call at a time: when it comes back the communicator may be gone.
  absl::Status Call(absl::FunctionRef<absl::Status()> call);
  // From now on this one has operation_timeout to end, and the one before no longer has; null: none
  // is to end. Then it is broken with DEADLINE_EXCEEDED.
  void Watch(std::shared_ptr<const NcclOperation> operation);
  // Likewise NCCL has operation_timeout to take this one; null: it has. Meanwhile the clock of the
  // one that is to end stands still: nobody looks whether it has ended.
  void WatchGiving(std::shared_ptr<const NcclOperation> operation);

  // Once, when the thread that issues has ended. Ends NCCL, in peace if it is asked to and nothing
  // is broken, and the thread. False when the device may still get to what it was given.
  bool Stop(bool in_peace);

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  void Run();
  // When to look at the clock again; breaks what is past its deadline.
  Clock::time_point CheckDeadlines(Clock::time_point now);
  void BreakLocked(const absl::Status& status, const absl::Status& reason_for_peers);
  void TearDown(const absl::Status& reason_for_peers);
  // For the call in which the thread that issues is.
  bool WaitForCall(Clock::time_point deadline);
  // NCCL's own end; false when it did not work out.
  bool EndInPeace();

  const Params params_;
  const std::chrono::nanoseconds operation_timeout_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  absl::Status broken_;
  absl::Status reason_for_peers_;
  bool torn_down_ = false;
  bool left_behind_ = false;  // a thread still is in a call
  bool in_call_ = false;
  Clock::time_point call_begun_;
  std::shared_ptr<const NcclOperation> watched_;
  Clock::time_point watched_deadline_;
  std::shared_ptr<const NcclOperation> given_;
  Clock::time_point given_begun_;
  bool end_hangs_ = false;  // worker_ is still in EndInPeace

  std::unique_ptr<DeadlineWorker> worker_;  // ends NCCL
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_NCCL_TEARDOWN_H_
