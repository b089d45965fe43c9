#include "server/comm/deadline_worker.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "kernels/base/host_deadline.h"
#include "kernels/base/steady_now.h"
#include "server/ops/start_thread.h"

namespace expertmesh {

struct DeadlineWorker::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> work;  // null when the thread is idle
  bool running = false;
  bool stopping = false;

  void Loop() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return stopping || work != nullptr; });
      if (work == nullptr) return;
      const std::function<void()> taken = std::exchange(work, nullptr);
      lock.unlock();
      taken();
      lock.lock();
      running = false;
      changed.notify_all();
    }
  }
};

DeadlineWorker::DeadlineWorker() : state_(std::make_shared<State>()) {}

absl::StatusOr<std::unique_ptr<DeadlineWorker>> DeadlineWorker::Start() {
  std::unique_ptr<DeadlineWorker> worker(new DeadlineWorker());
  absl::StatusOr<std::thread> thread = StartThread([state = worker->state_] { state->Loop(); });
  if (!thread.ok()) return thread.status();
  worker->thread_ = *std::move(thread);
  return worker;
}

DeadlineWorker::~DeadlineWorker() {
  if (!thread_.joinable()) return;
  bool is_back;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
    is_back = !state_->running;
    state_->changed.notify_all();
  }
  if (is_back) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

bool DeadlineWorker::Run(std::function<void()> work, absl::Duration timeout) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (state_->running) return false;
  state_->running = true;
  state_->work = std::move(work);
  state_->changed.notify_all();
  return WaitUntil(state_->changed, lock, SteadyNow() + timeout,
                   [this] { return !state_->running; });
}

}  // namespace expertmesh
