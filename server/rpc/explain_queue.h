#ifndef EXPERTMESH_SERVER_RPC_EXPLAIN_QUEUE_H_
#define EXPERTMESH_SERVER_RPC_EXPLAIN_QUEUE_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace expertmesh {

// One thread for explanations: routing a large request on one of gRPC's threads would hold up
// Forward calls. Thread safe.
class ExplainQueue {
 public:
  ExplainQueue();
  // Runs what is queued.
  ~ExplainQueue();
  // False when too much is queued already.
  bool Push(std::function<void()> work);

 private:
  void Work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_EXPLAIN_QUEUE_H_
