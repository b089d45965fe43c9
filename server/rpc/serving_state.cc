#include "server/rpc/serving_state.h"

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/steady_now.h"
#include "server/control/last_answer_time.h"
#include "server/ops/call_error.h"
#include "server/ops/clock.h"

namespace expertmesh {
namespace {

constexpr size_t kMaxWaiters = 4096;

constexpr absl::Duration kAnswerMargin = absl::Milliseconds(50);  // see LastAnswerTime

absl::Status DrainingError() {
  return CallError(ErrorReason::kDraining, "this server is stopping; another one may answer");
}

}  // namespace

struct ServingState::Impl {
  struct Waiting {
    WaitId id = 0;
    int64_t bytes = 0;
    Waiter waiter;
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::multimap<absl::Time, Waiting> waiting;  // by the time when it is given up
  int64_t waiting_bytes = 0;
  int64_t max_waiting_bytes = 0;
  WaitId next_id = 1;
  bool stopping = false;
  bool is_draining = false;
  std::unique_ptr<const ServingBackend> owned_backend;
  std::atomic<const ServingBackend*> backend{nullptr};
  std::thread timer;

  Waiting TakeLocked(std::multimap<absl::Time, Waiting>::iterator position) {
    Waiting taken = std::move(position->second);
    waiting_bytes -= taken.bytes;
    waiting.erase(position);
    return taken;
  }

  std::vector<Waiting> TakeAllLocked() {
    std::vector<Waiting> all;
    while (!waiting.empty()) all.push_back(TakeLocked(waiting.begin()));
    return all;
  }

  void GiveUpLateOnes() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopping) {
      if (waiting.empty()) {
        changed.wait(lock);
        continue;
      }
      const absl::Time first = waiting.begin()->first;
      if (first > SteadyNow()) {
        SteadyClock()->WaitUntil(changed, lock, first);
        continue;
      }
      Waiting late = TakeLocked(waiting.begin());
      lock.unlock();
      late.waiter(CallError(ErrorReason::kNoEpoch,
                            "the model is still being loaded, and the call's time is up"));
      lock.lock();
    }
  }

  void EndTimer() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    if (timer.joinable()) timer.join();
  }
};

ServingState::ServingState(int64_t max_waiting_bytes) : impl_(std::make_unique<Impl>()) {
  impl_->max_waiting_bytes = max_waiting_bytes;
  impl_->timer = std::thread([impl = impl_.get()] { impl->GiveUpLateOnes(); });
}

ServingState::~ServingState() {
  StartDraining();
  impl_->EndTimer();
}

ServingState::WaitId ServingState::Wait(absl::Time deadline, int64_t bytes, Waiter waiter) {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  absl::StatusOr<const ServingBackend*> answer = impl_->backend.load(std::memory_order_acquire);
  if (impl_->is_draining) {
    answer = DrainingError();
  } else if (*answer == nullptr) {
    if (impl_->waiting.size() < kMaxWaiters &&
        bytes <= impl_->max_waiting_bytes - impl_->waiting_bytes) {
      const WaitId id = impl_->next_id++;
      impl_->waiting_bytes += bytes;
      const absl::Time give_up = LastAnswerTime(deadline, SteadyNow(), kAnswerMargin);
      impl_->waiting.emplace(give_up, Impl::Waiting{id, bytes, std::move(waiter)});
      lock.unlock();
      impl_->changed.notify_all();
      return id;
    }
    answer = RetryableError(ErrorReason::kQueueFull,
                            "the model is still being loaded, and too many calls wait for it",
                            absl::Seconds(1));
  }
  lock.unlock();
  waiter(std::move(answer));
  return 0;
}

void ServingState::CancelWait(WaitId id) {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  for (auto position = impl_->waiting.begin(); position != impl_->waiting.end(); ++position) {
    if (position->second.id != id) continue;
    Impl::Waiting cancelled = impl_->TakeLocked(position);
    lock.unlock();
    cancelled.waiter(CallError(ErrorReason::kCallCancelled, "the client cancelled the call"));
    return;
  }
}

const ServingBackend* ServingState::backend() const {
  return impl_->backend.load(std::memory_order_acquire);
}

bool ServingState::draining() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->is_draining;
}

void ServingState::StartServing(const ServingBackend& backend) {
  std::vector<Impl::Waiting> waiting;
  {
    const std::lock_guard<std::mutex> lock(impl_->mutex);
    if (impl_->is_draining) return;
    impl_->owned_backend = std::make_unique<const ServingBackend>(backend);
    impl_->backend.store(impl_->owned_backend.get(), std::memory_order_release);
    waiting = impl_->TakeAllLocked();
  }
  impl_->EndTimer();
  for (Impl::Waiting& waiter : waiting) waiter.waiter(impl_->owned_backend.get());
}

void ServingState::StartDraining() {
  std::vector<Impl::Waiting> waiting;
  {
    const std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->is_draining = true;
    waiting = impl_->TakeAllLocked();
  }
  for (Impl::Waiting& waiter : waiting) waiter.waiter(DrainingError());
}

}  // namespace expertmesh
