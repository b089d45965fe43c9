#ifndef EXPERTMESH_TESTS_SERVER_CONTROL_FAKE_CLOCK_H_
#define EXPERTMESH_TESTS_SERVER_CONTROL_FAKE_CLOCK_H_

#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "absl/time/time.h"
#include "server/ops/clock.h"

namespace expertmesh {

// Time that stands still until the test moves it. Waits end by notification or by Advance. Thread
// safe; whoever waits must outlive every Advance in progress.
class FakeClock : public Clock {
 public:
  absl::Time Now() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return now_;
  }

  void WaitUntil(std::condition_variable& cv, std::unique_lock<std::mutex>& lock,
                 absl::Time deadline) override {
    const std::pair<std::condition_variable*, std::mutex*> waiter(&cv, lock.mutex());
    {
      std::lock_guard<std::mutex> own_lock(mutex_);
      if (now_ >= deadline) return;
      ++waiters_[waiter];
    }
    cv.wait(lock);
    std::lock_guard<std::mutex> own_lock(mutex_);
    if (--waiters_[waiter] == 0) waiters_.erase(waiter);
  }

  void Advance(absl::Duration duration) {
    std::map<std::pair<std::condition_variable*, std::mutex*>, int> waiters;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      now_ += duration;
      waiters = waiters_;
    }
    for (const auto& [waiter, count] : waiters) {
      // A waiter holds its mutex from its look at the time until it waits.
      { std::lock_guard<std::mutex> lock(*waiter.second); }
      waiter.first->notify_all();
    }
  }

 private:
  mutable std::mutex mutex_;
  absl::Time now_ = absl::FromUnixSeconds(1'800'000'000);
  std::map<std::pair<std::condition_variable*, std::mutex*>, int> waiters_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_CONTROL_FAKE_CLOCK_H_
