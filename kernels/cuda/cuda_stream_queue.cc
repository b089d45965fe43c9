#include "kernels/cuda/cuda_stream_queue.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/host_deadline.h"
#include "kernels/base/steady_now.h"
#include "kernels/cuda/cuda_device_point.h"
#include "kernels/cuda/cuda_status.h"

namespace expertmesh {
namespace {

// Polls without giving up the core in between: kernels of a small step take some ten microseconds.
constexpr int kEagerPolls = 64;
constexpr int kYieldingPolls = 512;
constexpr std::chrono::microseconds kPollInterval(50);

}  // namespace

CudaStreamQueue::CudaStreamQueue(int32_t device_index)
    : device_index_(device_index), events_(NewCudaEventPool(device_index)) {
  created_ = UseCudaDevice(device_index_);
  if (created_.ok()) {
    created_ = CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                          "cudaStreamCreateWithFlags", device_index_);
  }
  if (created_.ok()) {
    try {
      thread_ = std::thread([this] { RunThread(); });
    } catch (const std::system_error& error) {
      created_ = absl::ResourceExhaustedError(absl::StrCat("a stream's thread: ", error.what()));
    }
  }
  const Lock lock(mutex_);
  error_ = created_;
}

CudaStreamQueue::~CudaStreamQueue() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  // Nobody is left to tell of an error; a lost context has freed everything anyway.
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
}

absl::Status CudaStreamQueue::Add(Operation operation) {
  if (operation.kind == Operation::Kind::kWaitFor && !operation.event.done()) {
    const auto wake = [weak = weak_from_this()] {
      const std::shared_ptr<CudaStreamQueue> queue = weak.lock();
      if (queue == nullptr) return;
      const Lock lock(queue->mutex_);
      queue->changed_.notify_all();
      queue->advanced_.notify_all();
    };
    operation.event.OnPlaced(wake);
    operation.event.OnDone(wake);
  }
  Lock lock(mutex_);
  pending_.push_back(std::move(operation));
  Advance(lock, By::kOperation);
  WakeThread();
  return absl::OkStatus();
}

absl::Status CudaStreamQueue::Wait(absl::Time deadline) {
  Lock lock(mutex_);
  for (int num_polls = 0;; ++num_polls) {
    Advance(lock, By::kWait);
    if (!advancing_ && pending_.empty() && unmarked_) {
      advancing_ = true;
      PushMark(lock, std::nullopt);
      advancing_ = false;
      continue;
    }
    if (IsIdle()) return error_;
    WakeThread();
    if (SteadyNow() >= deadline) {
      return absl::DeadlineExceededError("stream still busy at the deadline");
    }
    if (!advancing_ && !marks_.empty()) {
      Pause(lock, advanced_, num_polls, deadline);
    } else {
      WaitUntil(advanced_, lock, deadline, [this] { return WaiterIsNeeded(); });
    }
  }
}

void CudaStreamQueue::ClearError() {
  const Lock lock(mutex_);
  error_ = created_;
  awaited_error_ = absl::OkStatus();
}

void CudaStreamQueue::Drain() {
  std::deque<Operation> dropped;
  {
    Lock lock(mutex_);
    dropping_ = true;
    advanced_.wait(lock, [this] { return !advancing_; });
    dropped = std::exchange(pending_, {});
  }
  // A device that was lost has nothing left to wait for.
  static_cast<void>(Wait(absl::InfiniteFuture()));
  for (Operation& operation : dropped) {
    if (operation.kind == Operation::Kind::kRecord) {
      operation.event.Signal(absl::CancelledError("the stream was destroyed first"));
    }
  }
  const Lock lock(mutex_);
  dropping_ = false;
  error_ = created_;
  awaited_error_ = absl::OkStatus();
}

bool CudaStreamQueue::IsIdle() const {
  return !advancing_ && pending_.empty() && marks_.empty() && !unmarked_;
}

bool CudaStreamQueue::FrontIsReady() const {
  if (pending_.empty() || dropping_) return false;
  const Operation& front = pending_.front();
  return front.kind != Operation::Kind::kWaitFor || !error_.ok() || front.event.done() ||
         IsOnDevice(front.event.point());
}

bool CudaStreamQueue::IsOnDevice(const std::shared_ptr<const DevicePoint>& point) const {
  return point != nullptr && point->device() == device_;
}

// Host work is the thread's, unless it is only to be dropped or marked.
bool CudaStreamQueue::FrontIsForAll() const {
  return FrontIsReady() &&
         (pending_.front().kind != Operation::Kind::kHostWork || !error_.ok() || unmarked_);
}

bool CudaStreamQueue::WaiterIsNeeded() const {
  if (advancing_) return false;
  return pending_.empty() || !marks_.empty() || FrontIsForAll();
}

// Without a Wait nothing else would tell an event that it is done, or run what stands behind it.
bool CudaStreamQueue::ThreadIsNeeded() const {
  if (advancing_) return false;
  if (num_event_marks_ > 0 || (!pending_.empty() && !marks_.empty())) return true;
  return FrontIsReady();
}

void CudaStreamQueue::WakeThread() {
  if (ThreadIsNeeded()) changed_.notify_all();
}

void CudaStreamQueue::RunThread() {
  // A thread begins on device 0, and asking for an event would make a context there. What fails
  // here fails for the operations too.
  static_cast<void>(UseCudaDevice(device_index_));
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || ThreadIsNeeded(); });
    if (stopping_) return;
    for (int num_polls = 0; ThreadIsNeeded() && !stopping_; ++num_polls) {
      Advance(lock, By::kThread);
      if (!marks_.empty()) Pause(lock, changed_, num_polls, absl::InfiniteFuture());
    }
  }
}

void CudaStreamQueue::Pause(Lock& lock, std::condition_variable& woken, int num_polls,
                            absl::Time deadline) {
  if (num_polls < kYieldingPolls) {
    lock.unlock();
    if (num_polls >= kEagerPolls) std::this_thread::yield();
    lock.lock();
  } else if (marks_.front().awaited.has_value()) {
    // Whoever signals it wakes the queue.
    WaitUntil(woken, lock, deadline, [this] {
      return stopping_ || advancing_ || marks_.empty() || !marks_.front().awaited.has_value() ||
             marks_.front().awaited->done() || FrontIsForAll();
    });
  } else {
    woken.wait_for(lock, kPollInterval);
  }
}

void CudaStreamQueue::Advance(Lock& lock, By by) {
  if (advancing_) return;
  advancing_ = true;
  while (AdvanceFront(lock, by) || (by != By::kOperation && TakeReachedMark(lock))) {
  }
  advancing_ = false;
  advanced_.notify_all();
}

bool CudaStreamQueue::TakeReachedMark(Lock& lock) {
  if (marks_.empty()) return false;
  if (const std::optional<Event>& awaited = marks_.front().awaited; awaited.has_value()) {
    if (!awaited->done() && !dropping_) return false;
    const absl::Status status = awaited->done()
                                    ? awaited->status()
                                    : absl::CancelledError("the stream was destroyed first");
    error_.Update(status);
    awaited_error_.Update(status);
    marks_.pop_front();
    return true;
  }
  cudaEvent_t reached = marks_.front().reached.get();
  lock.unlock();
  const cudaError_t error = cudaEventQuery(reached);
  // Else the next launch of this thread that asks for the last error would find it.
  if (error == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
  lock.lock();
  if (error == cudaErrorNotReady) return false;
  Mark mark = std::move(marks_.front());
  marks_.pop_front();
  if (error != cudaSuccess) {
    const absl::Status status = CudaStatus(error, "cudaEventQuery", device_index_);
    error_.Update(status);
    mark.error.Update(status);
  }
  mark.error.Update(awaited_error_);
  if (mark.event.has_value()) {
    --num_event_marks_;
    lock.unlock();
    mark.event->Signal(mark.error);
    mark.event.reset();
    lock.lock();
  }
  return true;
}

bool CudaStreamQueue::AdvanceFront(Lock& lock, By by) {
  if (!FrontIsReady()) return false;
  if (pending_.front().kind == Operation::Kind::kHostWork && error_.ok()) {
    if (unmarked_) {
      PushMark(lock, std::nullopt);
      return true;
    }
    if (!marks_.empty() || by != By::kThread) return false;
  }
  Operation operation = std::move(pending_.front());
  pending_.pop_front();
  switch (operation.kind) {
    case Operation::Kind::kWaitFor: {
      std::shared_ptr<const DevicePoint> point = operation.event.point();
      if (error_.ok() && IsOnDevice(point)) {
        WaitOnDevice(lock, operation.event, std::move(point));
      } else {
        error_.Update(operation.event.status());
      }
      return true;
    }
    case Operation::Kind::kRecord:
      if (unmarked_ || !marks_.empty()) {
        PushMark(lock, operation.event);
      } else {
        const absl::Status error = error_;
        lock.unlock();
        operation.event.Signal(error);
        lock.lock();
      }
      return true;
    case Operation::Kind::kLaunch:
    case Operation::Kind::kHostWork:
      break;
  }
  const bool is_launch = operation.kind == Operation::Kind::kLaunch;
  const bool is_run = error_.ok();
  if (is_run && is_launch) unmarked_ = true;
  lock.unlock();
  absl::Status status;
  if (is_run) {
    // Host work makes CUDA calls, too.
    status = UseCudaDevice(device_index_);
    if (status.ok()) status = is_launch ? operation.launch(stream_) : operation.work();
  }
  // What it captured goes here, before anyone is told that it is done.
  operation.launch = nullptr;
  operation.work = nullptr;
  lock.lock();
  error_.Update(status);
  return true;
}

void CudaStreamQueue::WaitOnDevice(Lock& lock, const Event& event,
                                   std::shared_ptr<const DevicePoint> point) {
  unmarked_ = true;
  lock.unlock();
  absl::Status status = UseCudaDevice(device_index_);
  if (status.ok()) {
    status = CudaStatus(
        cudaStreamWaitEvent(stream_, static_cast<const CudaDevicePoint&>(*point).event(), 0),
        "cudaStreamWaitEvent", device_index_);
  }
  point = nullptr;
  lock.lock();
  error_.Update(status);
  if (status.ok()) marks_.push_back({nullptr, event, std::nullopt, absl::OkStatus()});
}

absl::Status CudaStreamQueue::RecordMark(Mark& mark) {
  if (absl::Status status = UseCudaDevice(device_index_); !status.ok()) return status;
  absl::StatusOr<CudaEventPool::Shared> reached = events_->Take();
  if (!reached.ok()) return reached.status();
  mark.reached = *std::move(reached);
  return CudaStatus(cudaEventRecord(mark.reached.get(), stream_), "cudaEventRecord", device_index_);
}

void CudaStreamQueue::PushMark(Lock& lock, std::optional<Event> event) {
  unmarked_ = false;
  Mark mark = {nullptr, std::nullopt, std::move(event), error_};
  lock.unlock();
  const absl::Status status = RecordMark(mark);
  if (!status.ok()) {
    // Nothing can be marked any more, so the device must be done before anyone is told so.
    if (stream_ != nullptr) static_cast<void>(cudaStreamSynchronize(stream_));
    if (mark.event.has_value()) {
      mark.error.Update(status);
      mark.event->Signal(mark.error);
    }
  } else if (mark.event.has_value() && mark.error.ok()) {
    mark.event->Place(
        std::make_shared<CudaDevicePoint>(device_index_, mark.reached.get(), mark.reached));
  }
  lock.lock();
  error_.Update(status);
  if (!status.ok()) return;
  if (mark.event.has_value()) ++num_event_marks_;
  marks_.push_back(std::move(mark));
}

}  // namespace expertmesh
