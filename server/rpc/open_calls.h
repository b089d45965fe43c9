#ifndef EXPERTMESH_SERVER_RPC_OPEN_CALLS_H_
#define EXPERTMESH_SERVER_RPC_OPEN_CALLS_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "absl/time/time.h"

namespace expertmesh {

// Calls that gRPC has not let go of: it does so once it has written the whole answer to the
// connection, long after the controller is done with the call if the client reads slowly. Thread
// safe.
class OpenCalls {
 public:
  void Begin();
  // In the call's OnDone.
  void End();
  // Blocks until no call is open, or `deadline`. How many are open still.
  int64_t AwaitNone(absl::Time deadline);
  int64_t num_open() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable none_;
  int64_t num_open_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_OPEN_CALLS_H_
