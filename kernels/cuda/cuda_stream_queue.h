#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_STREAM_QUEUE_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_STREAM_QUEUE_H_

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/stream.h"
#include "kernels/cuda/cuda_event_pool.h"

namespace expertmesh {

// What a CudaStream does, made once and lent to one CudaStream after another: a cudaStream_t, the
// operations that have not reached it, and the marks that say, in the stream's order, how far the
// host knows of it: points that the device must have passed, and events that the device has waited
// for and that must still be done.
//
// Whichever thread comes by moves the queue on (Advance), one at a time: the caller of an
// operation, the caller of Wait, or the queue's own thread, which alone runs host functions.
class CudaStreamQueue : public std::enable_shared_from_this<CudaStreamQueue> {
 public:
  struct Operation {
    enum class Kind : uint8_t { kLaunch, kHostWork, kWaitFor, kRecord };
    Kind kind;
    absl::AnyInvocable<absl::Status(cudaStream_t)> launch;  // kLaunch
    absl::AnyInvocable<absl::Status()> work;                // kHostWork
    Event event;                                            // kWaitFor, kRecord
  };

  explicit CudaStreamQueue(int32_t device_index);
  ~CudaStreamQueue();  // nothing may be pending
  CudaStreamQueue(const CudaStreamQueue&) = delete;
  CudaStreamQueue& operator=(const CudaStreamQueue&) = delete;

  int32_t device_index() const { return device_index_; }
  cudaStream_t cuda_stream() const { return stream_; }
  absl::Status Add(Operation operation);
  absl::Status Wait(absl::Time deadline);
  void ClearError();
  // Drops what has not reached the device, waits for the rest, forgets errors.
  void Drain();

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Mark {
    CudaEventPool::Shared reached;  // null: the mark is `awaited`
    std::optional<Event> awaited;
    std::optional<Event> event;  // to signal, with the first of its errors
    absl::Status error;          // of the stream, when the event was recorded
  };

  // Operations leave the polling to others, and host work is the thread's.
  enum class By : uint8_t { kOperation, kWait, kThread };

  void Advance(Lock& lock, By by);
  bool TakeReachedMark(Lock& lock);
  bool AdvanceFront(Lock& lock, By by);
  void PushMark(Lock& lock, std::optional<Event> event);
  absl::Status RecordMark(Mark& mark);
  // Leaves the waiting to the device; what the event says is a mark.
  void WaitOnDevice(Lock& lock, const Event& event, std::shared_ptr<const DevicePoint> point);
  bool IsIdle() const;
  bool FrontIsReady() const;
  bool IsOnDevice(const std::shared_ptr<const DevicePoint>& point) const;
  // Whoever advances can do the first operation; not the work that the thread must run.
  bool FrontIsForAll() const;
  bool WaiterIsNeeded() const;
  bool ThreadIsNeeded() const;
  void WakeThread();
  void RunThread();
  // Lets time pass until the first mark may be reached; longer, the more often it was in vain.
  void Pause(Lock& lock, std::condition_variable& woken, int num_polls, absl::Time deadline);

  const int32_t device_index_;
  const Device device_{DeviceType::kCuda, device_index_};
  const std::shared_ptr<CudaEventPool> events_;
  cudaStream_t stream_ = nullptr;
  absl::Status created_;              // of stream_; the error that ClearError does not forget
  std::mutex mutex_;                  // of everything below
  std::condition_variable changed_;   // the thread waits for it
  std::condition_variable advanced_;  // everybody else does
  std::deque<Operation> pending_;
  std::deque<Mark> marks_;  // changed by the thread that advances alone
  int64_t num_event_marks_ = 0;
  bool unmarked_ = false;   // the device has work behind the last mark
  bool advancing_ = false;  // some thread is in Advance
  bool dropping_ = false;
  bool stopping_ = false;
  absl::Status error_;
  absl::Status awaited_error_;  // the first one among the marks that were reached
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_STREAM_QUEUE_H_
