#ifndef EXPERTMESH_SERVER_OPS_CLOCK_H_
#define EXPERTMESH_SERVER_OPS_CLOCK_H_

#include <condition_variable>
#include <mutex>

#include "absl/time/time.h"

namespace expertmesh {

// Time as the control plane sees it, so that tests can move it. Thread safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;
  // Like cv.wait(lock), but returns at `deadline` at the latest; may also return for no reason.
  // `lock` is held on entry and on return. Blocking.
  virtual void WaitUntil(std::condition_variable& cv, std::unique_lock<std::mutex>& lock,
                         absl::Time deadline) = 0;
};

// SteadyNow's time. Never destroyed.
Clock* SteadyClock();

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_CLOCK_H_
