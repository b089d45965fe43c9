#include "server/rank/compute_turns.h"

namespace expertmesh {

ComputeTurns::Turn ComputeTurns::Take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return Turn(this, queue_.insert(queue_.end(), true));
}

void ComputeTurns::Turn::Wait() {
  if (turns_ == nullptr) return;
  std::unique_lock<std::mutex> lock(turns_->mutex_);
  turns_->changed_.wait(lock, [this] { return place_ == turns_->queue_.begin(); });
}

void ComputeTurns::Turn::End() {
  ComputeTurns* const turns = std::exchange(turns_, nullptr);
  if (turns == nullptr) return;
  const std::lock_guard<std::mutex> lock(turns->mutex_);
  turns->queue_.erase(place_);
  turns->changed_.notify_all();
}

}  // namespace expertmesh
