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
  std::shared_ptr<const DevicePoint> point;
  std::vector<absl::AnyInvocable<void()>> callbacks;
  std::vector<absl::AnyInvocable<void()>> placed_callbacks;
};

Event::Event() : state_(std::make_shared<State>()) {}

void Event::Signal(absl::Status status) {
  // A callback or a waiter may drop the last other reference.
  const std::shared_ptr<State> state = state_;
  std::shared_ptr<const DevicePoint> point;
  std::vector<absl::AnyInvocable<void()>> callbacks;
  std::vector<absl::AnyInvocable<void()>> placed_callbacks;
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    if (state->done) return;
    state->done = true;
    state->status = std::move(status);
    point = std::move(state->point);
    callbacks = std::exchange(state->callbacks, {});
    placed_callbacks = std::exchange(state->placed_callbacks, {});
    state->changed.notify_all();
  }
  for (absl::AnyInvocable<void()>& callback : placed_callbacks) callback();
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

void Event::Place(std::shared_ptr<const DevicePoint> point) {
  if (point == nullptr) return;
  const std::shared_ptr<State> state = state_;
  std::vector<absl::AnyInvocable<void()>> callbacks;
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    if (state->done || state->point != nullptr) return;
    state->point = std::move(point);
    callbacks = std::exchange(state->placed_callbacks, {});
  }
  for (absl::AnyInvocable<void()>& callback : callbacks) callback();
}

std::shared_ptr<const DevicePoint> Event::point() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->point;
}

void Event::OnPlaced(absl::AnyInvocable<void()> callback) const {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->done && state_->point == nullptr) {
      state_->placed_callbacks.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

}  // namespace expertmesh
