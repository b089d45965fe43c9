#include "server/ops/clock.h"

#include <algorithm>

#include "kernels/base/steady_now.h"

namespace expertmesh {
namespace {

class SteadyClockImpl : public Clock {
 public:
  absl::Time Now() const override { return SteadyNow(); }

  void WaitUntil(std::condition_variable& cv, std::unique_lock<std::mutex>& lock,
                 absl::Time deadline) override {
    if (deadline == absl::InfiniteFuture()) {
      cv.wait(lock);
      return;
    }
    // In parts, so that no sum overflows.
    const absl::Duration wait = std::min(deadline - Now(), absl::Hours(1000));
    if (wait > absl::ZeroDuration()) cv.wait_for(lock, absl::ToChronoNanoseconds(wait));
  }
};

}  // namespace

Clock* SteadyClock() {
  static Clock* const clock = new SteadyClockImpl;
  return clock;
}

}  // namespace expertmesh
