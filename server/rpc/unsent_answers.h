#ifndef EXPERTMESH_SERVER_RPC_UNSENT_ANSWERS_H_
#define EXPERTMESH_SERVER_RPC_UNSENT_ANSWERS_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/ops/server_metrics.h"

namespace grpc {
class CallbackServerContext;
}

namespace expertmesh {

// Lets another thread end a call that gRPC may delete at any time. Thread safe.
class CallCanceller {
 public:
  explicit CallCanceller(grpc::CallbackServerContext* context) : context_(context) {}
  void Cancel();
  // First thing in OnDone: the context goes after it. Waits for a Cancel that runs.
  void Forget();

 private:
  // Cancelling may run the call's OnDone on the same thread.
  std::recursive_mutex mutex_;
  grpc::CallbackServerContext* context_;
};

// The memory of answers, from the moment at which a call is admitted until its answer has left.
// gRPC keeps an answer for as long as its client does not read it, whatever the client's reason,
// and no resource quota counts that. Thread safe, does not block.
class UnsentAnswers {
 public:
  using Id = uint64_t;
  static constexpr int64_t kSlowestBytesPerSecond = 8 << 20;
  static constexpr absl::Duration kLeastTimeToRead = absl::Seconds(3);
  // On top of the bytes of a unary call's answer: what gRPC and we keep of the call, and what a
  // step's output takes at least.
  static constexpr int64_t kCallOverheadBytes = 16 << 10;

  explicit UnsentAnswers(int64_t max_bytes, Gauge held_bytes_gauge = {})
      : max_bytes_(max_bytes), gauge_(held_bytes_gauge) {}

  // RESOURCE_EXHAUSTED (BUFFERS_EXHAUSTED) when no room is left; one answer is taken whatever its
  // size. Then, too, the calls are cancelled whose deadline has passed, or whose answers were made
  // long enough ago to be read at kSlowestBytesPerSecond: without pressure nobody minds that a
  // client takes longer. A canceller may stand for several answers. Cancelling may call into
  // gRPC's reactions: hold no lock that those take.
  absl::StatusOr<Id> Reserve(int64_t bytes, absl::Time deadline,
                             const std::shared_ptr<CallCanceller>& canceller);
  // The answer is made.
  void StartSending(Id id);
  // Once for each Reserve that was OK.
  void Release(Id id);

  int64_t held_bytes() const;

 private:
  struct Entry {
    int64_t bytes = 0;
    absl::Time deadline;
    std::shared_ptr<CallCanceller> canceller;
  };

  const int64_t max_bytes_;
  const Gauge gauge_;
  mutable std::mutex mutex_;
  int64_t held_bytes_ = 0;
  Id last_id_ = 0;  // never 0 itself
  std::unordered_map<Id, Entry> entries_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_UNSENT_ANSWERS_H_
