#ifndef EXPERTMESH_SERVER_COMM_DEADLINE_WORKER_H_
#define EXPERTMESH_SERVER_COMM_DEADLINE_WORKER_H_

#include <functional>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace expertmesh {

// A thread for calls into foreign code that may never return. It is there before it is needed, when
// the system may have no more threads.
class DeadlineWorker {
 public:
  // RESOURCE_EXHAUSTED as StartThread.
  static absl::StatusOr<std::unique_ptr<DeadlineWorker>> Start();
  // Leaves the thread to itself if it has not come back.
  ~DeadlineWorker();

  // Runs `work` on the thread; one call at a time. False when it has not come back after `timeout`,
  // or had not from an earlier call: then it may come back at any later time, so `work` owns what
  // it uses.
  bool Run(std::function<void()> work, absl::Duration timeout);

 private:
  struct State;
  DeadlineWorker();

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_DEADLINE_WORKER_H_
