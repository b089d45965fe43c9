#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "kernels/base/host_deadline.h"
#include "kernels/base/stream.h"
#include "kernels/base/stream_operation.h"

namespace expertmesh {
namespace {

class ThreadedHostStream : public Stream {
 public:
  ThreadedHostStream() : state_(std::make_shared<State>()) {
    worker_ = std::thread([state = state_.get()] { RunWorker(*state); });
  }

  ~ThreadedHostStream() override {
    {
      const std::lock_guard<std::mutex> lock(state_->mutex);
      state_->stopping = true;
      state_->changed.notify_all();
    }
    worker_.join();
    for (StreamOperation& operation : state_->pending) CancelOperation(operation);
  }

  Device device() const override { return Device{}; }

  absl::Status Enqueue(absl::AnyInvocable<absl::Status()> work) override {
    return Add({StreamOperation::Kind::kWork, std::move(work), Event()});
  }
  absl::Status Copy(void* dst, const void* src, int64_t size_bytes) override {
    absl::StatusOr<StreamOperation> copy = HostCopyOperation(dst, src, size_bytes);
    if (!copy.ok()) return copy.status();
    return Add(*std::move(copy));
  }
  absl::Status WaitFor(const Event& event) override {
    return Add({StreamOperation::Kind::kWaitFor, nullptr, event});
  }
  absl::Status Record(const Event& event) override {
    return Add({StreamOperation::Kind::kRecord, nullptr, event});
  }

  absl::Status Wait(absl::Time deadline) override {
    std::unique_lock<std::mutex> lock(state_->mutex);
    const bool idle = WaitUntil(state_->changed, lock, deadline,
                                [this] { return state_->pending.empty() && !state_->running; });
    if (!idle) return absl::DeadlineExceededError("stream still busy at the deadline");
    return state_->error;
  }

  void ClearError() override {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->error = absl::OkStatus();
  }

 private:
  // Shared with the callbacks of events that may outlive the stream.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<StreamOperation> pending;
    bool running = false;
    bool stopping = false;
    absl::Status error;
  };

  absl::Status Add(StreamOperation operation) {
    if (operation.kind == StreamOperation::Kind::kWaitFor && !operation.event.done()) {
      operation.event.OnDone([weak = std::weak_ptr<State>(state_)] {
        const std::shared_ptr<State> state = weak.lock();
        if (state == nullptr) return;
        const std::lock_guard<std::mutex> lock(state->mutex);
        state->changed.notify_all();
      });
    }
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->pending.push_back(std::move(operation));
    state_->changed.notify_all();
    return absl::OkStatus();
  }

  // Lock held. A wait is skipped, as all later work is, when the stream has an error.
  static bool FrontIsReady(const State& state) {
    if (state.pending.empty()) return false;
    const StreamOperation& front = state.pending.front();
    return front.kind != StreamOperation::Kind::kWaitFor || !state.error.ok() || front.event.done();
  }

  static void RunWorker(State& state) {
    std::unique_lock<std::mutex> lock(state.mutex);
    while (true) {
      state.changed.wait(lock, [&state] { return state.stopping || FrontIsReady(state); });
      if (state.stopping) return;
      StreamOperation operation = std::move(state.pending.front());
      state.pending.pop_front();
      state.running = true;
      absl::Status error = state.error;
      lock.unlock();
      RunOperation(operation, error);
      lock.lock();
      state.error = std::move(error);
      state.running = false;
      if (state.pending.empty()) state.changed.notify_all();
    }
  }

  std::shared_ptr<State> state_;
  std::thread worker_;
};

}  // namespace

std::unique_ptr<Stream> NewThreadedHostStream() { return std::make_unique<ThreadedHostStream>(); }

}  // namespace expertmesh
