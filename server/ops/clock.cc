#include "server/ops/clock.h"

#include <algorithm>

#include "absl/time/clock.h"

namespace expertmesh {
namespace {

class SystemClockImpl : public Clock {
 public:
  absl::Time Now() const override { return absl::Now(); }

  void WaitUntil(std::condition_variable& cv, std::unique_lock<std::mutex>& lock,
                 absl::Time deadline) override {
    if (deadline == absl::InfiniteFuture()) {
      cv.wait(lock);
      return;
    }
    // Waits on the steady clock, in parts, so that a jump of the system's time is noticed.
    const absl::Duration wait = std::min(deadline - absl::Now(), absl::Seconds(10));
    if (wait > absl::ZeroDuration()) cv.wait_for(lock, absl::ToChronoNanoseconds(wait));
  }
};

}  // namespace

Clock* SystemClock() {
  static Clock* const clock = new SystemClockImpl;
  return clock;
}

}  // namespace expertmesh
