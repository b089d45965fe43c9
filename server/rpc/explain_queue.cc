#include "server/rpc/explain_queue.h"

#include <utility>

namespace expertmesh {
namespace {

constexpr size_t kMaxQueued = 64;

}  // namespace

ExplainQueue::ExplainQueue(int64_t max_bytes)
    : max_bytes_(max_bytes), thread_([this] { Work(); }) {}

ExplainQueue::~ExplainQueue() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool ExplainQueue::Push(int64_t bytes, std::function<void()> work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.size() >= kMaxQueued) return false;
    if (held_bytes_ > 0 && bytes > max_bytes_ - held_bytes_) return false;
    held_bytes_ += bytes;
    queue_.push_back({bytes, std::move(work)});
  }
  changed_.notify_one();
  return true;
}

void ExplainQueue::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    entry.work();
    entry.work = nullptr;
    lock.lock();
    held_bytes_ -= entry.bytes;
  }
}

}  // namespace expertmesh
