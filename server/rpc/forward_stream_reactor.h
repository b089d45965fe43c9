#ifndef EXPERTMESH_SERVER_RPC_FORWARD_STREAM_REACTOR_H_
#define EXPERTMESH_SERVER_RPC_FORWARD_STREAM_REACTOR_H_

#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/rpc/forward_reactor.h"
#include "server/rpc/forward_stream_set.h"
#include "server/rpc/forward_stream_state.h"

namespace expertmesh {

// One ForwardStream: each message is a Forward call of its own, whatever becomes of the others.
// Lives until gRPC has called OnDone and nothing runs in it any more; gRPC is told that the stream
// has ended only after every call's `done` has run, so whatever waits for the server's calls to end
// waits for those too. Never blocks: the calling thread is one of gRPC's few, or one that runs
// steps.
class ForwardStreamReactor final
    : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
      public std::enable_shared_from_this<ForwardStreamReactor> {
 public:
  // gRPC's own, until OnDone.
  static ForwardStreamReactor* Start(const ForwardEnvironment& environment,
                                     ForwardStreamSet* streams,
                                     grpc::CallbackServerContext* context);

  // See ForwardStreamSet::EndAll; from any thread.
  void EndWhenAnswered();

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  struct Message;
  using MessagePtr = std::shared_ptr<Message>;

  ForwardStreamReactor(const ForwardEnvironment& environment, ForwardStreamSet* streams,
                       grpc::CallbackServerContext* context);

  // Starts what can be started. One thread does so at a time, without the mutex; the others leave
  // what they have changed to it.
  void Pump();
  // Ends the stream; its calls are cancelled and their answers dropped.
  void End(absl::Status status);
  void Cancel(Message* message);
  // Of the memory that is reserved for its answer, if any; before the stream may end.
  void Release(ForwardStreamMessage* message);

  // The life of one message, on any thread.
  void Process(const MessagePtr& message, int64_t timeout_micros, bool alone);
  void Run(const MessagePtr& message, absl::StatusOr<const ServingBackend*> backend,
           bool may_run_inline);
  void Submit(const MessagePtr& message, ValidForward valid, bool may_run_inline);
  // The answer to validate_only.
  void Validate(const MessagePtr& message, ValidForward valid);
  void Complete(const MessagePtr& message, absl::StatusOr<ForwardResult> result);
  void Answer(const MessagePtr& message, absl::StatusOr<grpc::ByteBuffer> response);

  const ForwardEnvironment& environment_;
  ForwardStreamSet* const streams_;
  const absl::Time stream_deadline_;
  const std::shared_ptr<CallCanceller> canceller_;
  std::shared_ptr<ForwardStreamReactor> self_;  // gRPC's reference
  grpc::ByteBuffer read_;                       // of the read that is outstanding

  std::mutex mutex_;
  bool pumping_ = false;
  ForwardStreamState state_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_FORWARD_STREAM_REACTOR_H_
