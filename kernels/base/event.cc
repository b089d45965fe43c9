#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/base/host_deadline.h"
#include "kernels/base/stream.h"

namespace expertmesh {

struct Event::State {
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  bool done = false;
  absl::Status status;
  std::vector<absl::AnyInvocable<void()>> callbacks;
};

Event::Event() : state_(std::make_shared<State>()) {}

void Event::Signal(absl::Status status) {
  // A callback or a waiter may drop the last other reference.
  const std::shared_ptr<State> state = state_;
  std::vector<absl::AnyInvocable<void()>> callbacks;
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    if (state->done) return;
    state->done = true;
    state->status = std::move(status);
    callbacks = std::exchange(state->callbacks, {});
    state->changed.notify_all();
  }
  for (absl::AnyInvocable<void()>& callback : callbacks) callback();
}

bool Event::done() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->done;
}

absl::Status Event::status() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->status;
}

void Event::OnDone(absl::AnyInvocable<void()> callback) const {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->done) {
      state_->callbacks.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

absl::Status Event::Wait(absl::Time deadline) const {
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (!WaitUntil(state_->changed, lock, deadline, [this] { return state_->done; })) {
    return absl::DeadlineExceededError("event still pending at its deadline");
  }
  return state_->status;
}

}  // namespace expertmesh
