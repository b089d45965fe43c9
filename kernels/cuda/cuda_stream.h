#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_STREAM_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_STREAM_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "kernels/base/stream.h"

namespace expertmesh {

// Stream on a GPU. No operation but Wait blocks.
//   Launch, Copy   reach the device at once, on the calling thread, unless a host function, or an
//                  event that is neither done nor placed on the device, stands before them
//   WaitFor        leaves the waiting to the device for an event that is placed there: one that
//                  another stream of the device records, once it has been given that, or one of a
//                  communicator. What follows runs behind it on the device, even if it fails then,
//                  and nobody is told of what follows before the event is done
//   Record         costs the device nothing: a thread of the stream polls for it and signals the
//                  event; nothing that follows waits for that
//   Enqueue        runs on that thread once the device has done all before it, and holds up what
//                  follows: a round trip between device and host, not for hot paths. The work may
//                  make CUDA calls and touch host memory alone
//   Wait           polls from the calling thread
// An error of the device shows at the next Record, Enqueue or Wait. Destruction waits for what the
// device has been given (what hangs there must be ended by the caller first: a communicator's
// abort), then signals CANCELLED to events that were recorded behind it, or behind a wait for an
// event that is not done.
class CudaStream : public Stream {
 public:
  // `launch` makes CUDA calls that enqueue on the stream it is given and do not block; the device
  // is current. It runs at once or, when something on the host stands before, later on the stream's
  // thread; its error is the stream's. Not after an error.
  virtual absl::Status Launch(absl::AnyInvocable<absl::Status(cudaStream_t)> launch) = 0;

  // For calls that only name the stream; what is enqueued on it outside Launch has no order with
  // Enqueue and WaitFor.
  virtual cudaStream_t cuda_stream() const = 0;
};

// Streams of one device, used again and again: creating one takes longer than a small step. Thread
// safe; streams may outlive it.
class CudaStreamPool {
 public:
  explicit CudaStreamPool(int32_t device_index);
  ~CudaStreamPool();
  // Never null: when the device gives no stream, one whose error says so.
  std::unique_ptr<CudaStream> NewStream();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

// Null when `stream` is no CudaStream.
CudaStream* AsCudaStream(Stream& stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_STREAM_H_
