#ifndef EXPERTMESH_CLIENT_FORWARD_STREAM_H_
#define EXPERTMESH_CLIENT_FORWARD_STREAM_H_

#include <grpcpp/generic/generic_stub.h>

#include <cstdint>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/forward_input.h"

namespace expertmesh {

struct ForwardStreamOptions {
  // Of the whole stream, which ends with DEADLINE_EXCEEDED then.
  absl::Duration timeout = absl::InfiniteDuration();
  // Requests that were sent and not answered; a single message may be larger.
  int64_t max_inflight_bytes = int64_t{64} << 20;
  int64_t max_inflight_messages = 4096;
};

// Many Forward calls over one stream, pipelined; made by ExpertClient::OpenForwardStream. Thread
// safe, except that the destructor must come last. Nothing is retried: a stream that broke answers
// each of its messages with the reason, and whoever sent them knows which to send again.
class ForwardStream {
 public:
  using Done = absl::AnyInvocable<void(absl::StatusOr<ForwardOutput>)>;

  static std::unique_ptr<ForwardStream> Open(std::shared_ptr<grpc::GenericStub> stub,
                                             const ForwardStreamOptions& options);

  // Cancels what is not answered yet and waits for the callbacks that run.
  ~ForwardStream();
  ForwardStream(const ForwardStream&) = delete;
  ForwardStream& operator=(const ForwardStream&) = delete;

  // Sends one message; does not block. `done` runs once if this returns OK, on a gRPC thread or the
  // stream's own, one at a time: with the answer or the server's error (client_error.h), with what
  // ended the stream, or with DEADLINE_EXCEEDED 100 ms after the timeout where the server has not
  // said so itself. It must not block, for answers are read by the same thread, nor destroy the
  // stream; it may send. `stream_seq` must not be in flight: it is until the server has answered,
  // its timeout or not. With a timeout of zero the stream's own counts.
  // Not OK, and nothing was sent: INVALID_ARGUMENT for the input or a stream_seq in flight,
  // RESOURCE_EXHAUSTED when too much is in flight (see WaitForRoom), FAILED_PRECONDITION after
  // HalfClose, or the status that the stream ended with. Of `input` only TensorBytes with an owner
  // are kept.
  absl::Status Send(uint64_t stream_seq, absl::Duration timeout, const ForwardInput& input,
                    Done done);

  // Blocks until Send would find room, or the stream has ended, or `deadline`: false. Not from a
  // callback.
  bool WaitForRoom(absl::Time deadline);

  // Asks the server to give the message up. Its callback runs as always, with CANCELLED or, if the
  // answer was on its way, with that.
  void Cancel(uint64_t stream_seq);

  // No more messages will be sent; those in flight are answered.
  void HalfClose();

  // HalfClose, then blocks until the stream has ended and all callbacks have run; returns its
  // status. Not from a callback.
  absl::Status Finish();

  // Gives up everything at once; callbacks run with CANCELLED. Does not block.
  void Abort();

 private:
  class Reactor;
  ForwardStream(std::shared_ptr<grpc::GenericStub> stub, std::shared_ptr<Reactor> reactor);
  // The channel's last reference must go on a caller's thread, not on one of gRPC's.
  const std::shared_ptr<grpc::GenericStub> stub_;
  const std::shared_ptr<Reactor> reactor_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_FORWARD_STREAM_H_
