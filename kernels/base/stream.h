#ifndef EXPERTMESH_KERNELS_BASE_STREAM_H_
#define EXPERTMESH_KERNELS_BASE_STREAM_H_

#include <cstdint>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/buffer.h"

namespace expertmesh {

// A place in the order of a device, for which streams of that device can wait without the host.
// What it is they alone know.
class DevicePoint {
 public:
  explicit DevicePoint(Device device) : device_(device) {}
  virtual ~DevicePoint() = default;
  Device device() const { return device_; }

 private:
  const Device device_;
};

// A point in a stream's order, or a host-side completion, that other streams and the host can wait
// for. One-shot: it goes from pending to done once, with OK or with an error. Thread safe; shared
// by reference count.
class Event {
 public:
  Event();
  // First call wins; later calls are ignored.
  void Signal(absl::Status status = absl::OkStatus());
  bool done() const;
  // The status it was signalled with; OK while it is pending.
  absl::Status status() const;
  // Runs `callback` once the event is done: at once on this thread when it is done already, else on
  // the thread that signals. It must not block.
  void OnDone(absl::AnyInvocable<void()> callback) const;
  // Blocks. DEADLINE_EXCEEDED when it is still pending at `deadline`, else the status it was
  // signalled with.
  absl::Status Wait(absl::Time deadline) const;

  // For streams and what works beside them, not for those who use them. A pending event is placed
  // when the device will pass `point` before it is done: a stream of that device that waits for it
  // may give the device what follows, behind the point. Signal, which must come, still says whether
  // all went well; until it has, such a stream says so of nothing behind. A null point, and one for
  // an event that is done or placed already, is ignored.
  void Place(std::shared_ptr<const DevicePoint> point);
  // Null when it is not placed, or done.
  std::shared_ptr<const DevicePoint> point() const;
  // As OnDone, once it is placed or done.
  void OnPlaced(absl::AnyInvocable<void()> callback) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// An ordered queue of work on one device. OK from an operation means enqueued, not done; an error
// of enqueued work is kept, later work of the stream is dropped, and Wait reports the first error.
// Operations come from one thread at a time. Memory that an enqueued operation names must live
// until a Wait or an Event after it has returned.
class Stream {
 public:
  // Finishes the operation that is running; drops what has not started and signals its recorded
  // events CANCELLED.
  virtual ~Stream() = default;
  virtual Device device() const = 0;

  // Runs `work` on the host in stream order (host streams: this is how kernels run).
  virtual absl::Status Enqueue(absl::AnyInvocable<absl::Status()> work) = 0;
  // Copies between host and this device, or within it; ranges must not overlap.
  virtual absl::Status Copy(void* dst, const void* src, int64_t size_bytes) = 0;
  // Everything enqueued later runs after `event` is done; an error of the event becomes the
  // stream's error.
  virtual absl::Status WaitFor(const Event& event) = 0;
  // Signals `event` when everything enqueued before is done, with the stream's error if there is
  // one.
  virtual absl::Status Record(const Event& event) = 0;
  // Blocks until everything enqueued is done: its first error, or DEADLINE_EXCEEDED (the work goes
  // on).
  virtual absl::Status Wait(absl::Time deadline) = 0;
  // Forgets an error after its step has been given up. Only when nothing is pending.
  virtual void ClearError() = 0;
};

// Host stream that runs work on the calling thread: at once when nothing pending stands before it.
// Work behind a pending WaitFor event is kept and runs, in order, inside the next operation or Wait
// after the event is done; only Wait blocks. So one thread can drive several ranks in turn, and a
// small step pays no hand-off.
std::unique_ptr<Stream> NewInlineHostStream();

// Host stream with one worker thread of its own; no operation but Wait blocks.
std::unique_ptr<Stream> NewThreadedHostStream();

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_STREAM_H_
