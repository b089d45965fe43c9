#ifndef EXPERTMESH_KERNELS_BASE_HOST_DEADLINE_H_
#define EXPERTMESH_KERNELS_BASE_HOST_DEADLINE_H_

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/time/time.h"
#include "kernels/base/steady_now.h"

namespace expertmesh {

// Waits for `ready()` until `deadline`; false when it passed first. Measured on the steady clock,
// so that a change of the wall clock neither cuts a wait short nor prolongs it. (std:: rather than
// absl::Mutex: ThreadSanitizer cannot see into the packaged absl library.)
template <typename Ready>
bool WaitUntil(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
               absl::Time deadline, Ready ready) {
  if (deadline == absl::InfiniteFuture()) {
    changed.wait(lock, ready);
    return true;
  }
  // A thousand hours, so that the sum below cannot overflow.
  const absl::Duration remaining = std::min(deadline - SteadyNow(), absl::Hours(1000));
  return changed.wait_until(
      lock, std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(remaining), ready);
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_HOST_DEADLINE_H_
