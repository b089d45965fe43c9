#include "server/rpc/explain_queue.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "server/ops/call_error.h"
#include "server/ops/clock.h"

namespace expertmesh {
namespace {

constexpr size_t kMaxQueued = 64;

}  // namespace

ExplainQueue::ExplainQueue(int64_t max_bytes)
    : max_bytes_(max_bytes), worker_([this] { RunWork(); }) {
  try {
    timer_ = std::thread([this] { WatchDeadlines(); });
  } catch (const std::system_error&) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    worker_.join();
    throw;  // main says so
  }
}

ExplainQueue::~ExplainQueue() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    deadlines_changed_.notify_all();
  }
  worker_.join();
  timer_.join();
}

ExplainQueue::Id ExplainQueue::Push(int64_t bytes, absl::Time deadline, Work work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (queue_.size() >= kMaxQueued) return 0;
  if (held_bytes_ > 0 && bytes > max_bytes_ - held_bytes_) return 0;
  held_bytes_ += bytes;
  queue_.emplace(++last_id_, Entry{bytes, deadline, std::move(work)});
  changed_.notify_one();
  deadlines_changed_.notify_one();
  return last_id_;
}

void ExplainQueue::Cancel(Id id) {
  std::unique_lock<std::mutex> lock(mutex_);
  Drop(lock, id, CallError(ErrorReason::kCallCancelled, "the call was cancelled"));
}

void ExplainQueue::Drop(std::unique_lock<std::mutex>& lock, Id id, absl::Status why) {
  auto found = queue_.extract(id);
  if (found.empty()) return;
  lock.unlock();
  found.mapped().work(std::move(why));
  found.mapped().work = nullptr;
  lock.lock();
  held_bytes_ -= found.mapped().bytes;
}

void ExplainQueue::RunWork() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Drop(lock, queue_.begin()->first, absl::OkStatus());
  }
}

void ExplainQueue::WatchDeadlines() {
  Clock* const clock = SteadyClock();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    const auto next = std::min_element(
        queue_.begin(), queue_.end(),
        [](const auto& a, const auto& b) { return a.second.deadline < b.second.deadline; });
    if (next == queue_.end()) {
      deadlines_changed_.wait(lock);
    } else if (clock->Now() < next->second.deadline) {
      clock->WaitUntil(deadlines_changed_, lock, next->second.deadline);
    } else {
      Drop(lock, next->first,
           CallError(ErrorReason::kDeadlinePassed, "the call's deadline passed while it waited"));
    }
  }
}

}  // namespace expertmesh
