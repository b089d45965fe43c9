#ifndef EXPERTMESH_SERVER_RPC_EXPLAIN_QUEUE_H_
#define EXPERTMESH_SERVER_RPC_EXPLAIN_QUEUE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace expertmesh {

// One thread for explanations: routing a large request on one of gRPC's threads would hold up
// Forward calls. Thread safe.
class ExplainQueue {
 public:
  // Of what queued and running work holds; one is taken whatever its size.
  explicit ExplainQueue(int64_t max_bytes);
  // Runs what is queued.
  ~ExplainQueue();
  // False when too much is queued already. `work`, which holds `bytes`, says itself whether it is
  // still wanted when its turn comes.
  bool Push(int64_t bytes, std::function<void()> work);

 private:
  void Work();

  struct Entry {
    int64_t bytes = 0;
    std::function<void()> work;
  };

  const int64_t max_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  int64_t held_bytes_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_EXPLAIN_QUEUE_H_
