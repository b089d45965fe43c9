#ifndef EXPERTMESH_SERVER_RPC_EXPLAIN_QUEUE_H_
#define EXPERTMESH_SERVER_RPC_EXPLAIN_QUEUE_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace expertmesh {

// One thread for explanations: routing a large request on one of gRPC's threads would hold up
// Forward calls. Thread safe.
class ExplainQueue {
 public:
  // Called once: with OK on the queue's thread when its turn has come; or, while it waits, with
  // DEADLINE_EXCEEDED (DEADLINE_PASSED) on a thread that must not be blocked, or CANCELLED
  // (CALL_CANCELLED) within Cancel. What runs already is finished.
  using Work = std::function<void(absl::Status)>;
  using Id = uint64_t;

  // Of what queued and running work holds; one is taken whatever its size.
  explicit ExplainQueue(int64_t max_bytes);
  // Runs what is queued.
  ~ExplainQueue();

  // 0 when too much is queued already; `work`, which holds `bytes`, is not called then.
  Id Push(int64_t bytes, absl::Time deadline, Work work);
  // Nothing where it does not wait any more.
  void Cancel(Id id);

 private:
  struct Entry {
    int64_t bytes = 0;
    absl::Time deadline;
    Work work;
  };

  void RunWork();
  void WatchDeadlines();
  // Takes what waits out of the queue and tells it why, with `lock` released.
  void Drop(std::unique_lock<std::mutex>& lock, Id id, absl::Status why);

  const int64_t max_bytes_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::condition_variable deadlines_changed_;
  std::map<Id, Entry> queue_;  // by arrival
  Id last_id_ = 0;
  int64_t held_bytes_ = 0;
  bool stopping_ = false;

  std::thread worker_;
  std::thread timer_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_EXPLAIN_QUEUE_H_
