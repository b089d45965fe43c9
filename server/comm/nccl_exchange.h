#ifndef EXPERTMESH_SERVER_COMM_NCCL_EXCHANGE_H_
#define EXPERTMESH_SERVER_COMM_NCCL_EXCHANGE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/comm/comm_traffic.h"
#include "server/comm/communicator.h"
#include "server/comm/nccl_event_pool.h"
#include "server/comm/nccl_functions.h"
#include "server/comm/nccl_operation.h"
#include "server/comm/nccl_teardown.h"
#include "server/comm/operation_order.h"
#include "server/comm/operation_places.h"

namespace expertmesh {

// NCCL's result as a status that begins with `call`.
absl::Status NcclStatus(NcclFunctions& functions, NcclFunctions::Result result,
                        NcclFunctions::Comm comm, const char* call);

// One rank's end of a group of NCCL: what nccl_communicator.cc shares with the work that it leaves
// on streams. A thread of its own agrees with the peers on the operations, gives them to NCCL, and
// sees them end. Thread safe.
class NcclExchange : public std::enable_shared_from_this<NcclExchange> {
 public:
  struct Params {
    int32_t ep_rank = 0;
    int32_t ep_size = 1;
    int32_t device_index = 0;
    std::shared_ptr<NcclFunctions> functions;
    NcclFunctions::Comm comm = nullptr;  // stands
    NcclFunctions::DeviceStream stream = nullptr;
    std::unique_ptr<Communicator> control;
    absl::Duration operation_timeout;
    absl::Duration abort_timeout;
    std::function<void(const absl::Status&)> on_stuck_abort;
  };

  // Takes over comm and stream.
  explicit NcclExchange(Params params);
  ~NcclExchange();  // after Stop

  // Once, when a shared_ptr owns it. RESOURCE_EXHAUSTED without threads: then only Stop is left.
  absl::Status Begin();

  int32_t ep_rank() const { return params_.ep_rank; }
  int32_t ep_size() const { return params_.ep_size; }
  // Breaks, and is broken, as one.
  NcclTeardown& teardown() { return teardown_; }
  CommTraffic& traffic() { return traffic_; }
  std::vector<int64_t> wait_nanos() const { return params_.control->wait_nanos(); }

  // The operation was called on `stream`. The first error if the exchange is broken; then nothing
  // is enqueued.
  absl::Status Start(OperationPlace place, std::shared_ptr<NcclOperation> operation,
                     Stream& stream);
  void CloseOrder(int64_t order, int64_t num_operations);

  // Once. Ends NCCL in peace if the exchange is whole, leaves `control`, ends the threads.
  void Stop();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Operations = std::deque<std::shared_ptr<NcclOperation>>;
  using Result = NcclFunctions::Result;

  NcclTeardown::Params TeardownParams();
  void Run();
  bool IsWhole() const { return teardown_.broken().ok(); }
  // Each returns whether it moved an operation on.
  bool SendHeaders(Lock& lock);
  bool IssueFirst(Lock& lock);
  bool FinishFirst(Lock& lock);

  static bool IsReadyToAgree(const NcclOperation* called);
  bool CanMove() const;
  absl::Status Issue(NcclOperation& operation);
  absl::Status GiveToNccl(NcclOperation& operation);
  Result CallNccl(const NcclOperation& operation);
  // What a call of NCCL has answered, unless the exchange broke meanwhile: an abort may have freed
  // the communicator, so nothing more can be asked of it.
  absl::Status StatusOfCall(Result result, const char* call);
  absl::Status AskNccl(Result* result);
  absl::Status HasCompleted(const NcclOperation& operation, bool* completed);
  void FailPending(const absl::Status& broken);
  void Wake();
  void WakeWhenDone(const Event& event);

  Params params_;
  NcclFunctions& functions_;
  CommTraffic traffic_;
  const std::shared_ptr<NcclEventPool> events_;

  mutable std::mutex mutex_;  // guards what follows; taken before teardown_'s
  std::condition_variable changed_;
  bool stopping_ = false;
  OperationOrder<NcclOperation> called_;  // that have not sent their headers
  Operations agreeing_;                   // by place; headers are sent
  Operations issued_;                     // by place; NCCL has them

  std::unique_ptr<Stream> control_stream_;
  NcclTeardown teardown_;
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_NCCL_EXCHANGE_H_
