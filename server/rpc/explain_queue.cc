#include "server/rpc/explain_queue.h"

#include <utility>

namespace expertmesh {
namespace {

constexpr size_t kMaxQueued = 64;

}  // namespace

ExplainQueue::ExplainQueue() : thread_([this] { Work(); }) {}

ExplainQueue::~ExplainQueue() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool ExplainQueue::Push(std::function<void()> work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.size() >= kMaxQueued) return false;
    queue_.push_back(std::move(work));
  }
  changed_.notify_one();
  return true;
}

void ExplainQueue::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    lock.lock();
  }
}

}  // namespace expertmesh
