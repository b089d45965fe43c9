#ifndef EXPERTMESH_SERVER_RPC_FORWARD_REACTOR_H_
#define EXPERTMESH_SERVER_RPC_FORWARD_REACTOR_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/control/forward_controller.h"
#include "server/ops/server_metrics.h"
#include "server/rpc/answered_calls.h"
#include "server/rpc/explain_queue.h"
#include "server/rpc/forward_decoder.h"
#include "server/rpc/forward_response.h"
#include "server/rpc/open_calls.h"
#include "server/rpc/serving_state.h"
#include "server/rpc/unsent_answers.h"

namespace expertmesh {

// What all Forward, ForwardStream and Explain calls share; outlives them.
struct ForwardEnvironment {
  ServingState* state = nullptr;
  const ServerMetrics* metrics = nullptr;
  AnsweredCalls* answered = nullptr;
  ForwardDecodeLimits decode_limits;
  absl::Duration max_deadline;
  ExplainQueue* explain_queue = nullptr;
  std::atomic<uint64_t>* next_request_number = nullptr;
  UnsentAnswers* unsent_answers = nullptr;  // to unary calls
  // On streams, whose own budget lets every one of them hold an answer.
  UnsentAnswers* unsent_stream_answers = nullptr;
  OpenCalls* open_calls = nullptr;
};

// The client's deadline, or the server's own where that is earlier or the client gave none.
absl::Time EffectiveDeadline(const grpc::CallbackServerContext& context, absl::Time arrival,
                             absl::Duration max_deadline);
// Of a call that has waited: OK unless it was cancelled or its deadline has passed.
absl::Status UnwantedError(bool is_cancelled, absl::Time deadline);
// Where `status` says that the deadline passed, and that was the server's own: the same, saying so.
absl::Status NameServersDeadline(absl::Status status, absl::Time arrival, absl::Time deadline,
                                 absl::Duration max_deadline);
// Of a unary call whose reading ended before a message came, as gRPC tells by a buffer that is not
// valid: then the client is gone, and what it did not send is no bad input.
absl::Status MissingMessageError(absl::Time deadline);
// RESOURCE_EXHAUSTED (BUFFERS_EXHAUSTED).
absl::StatusOr<Buffer> AllocatePayload(Allocator* allocator, int64_t size_bytes);

// One Forward call, from its whole request to its sent answer. Owned by gRPC until OnDone, where it
// deletes itself. Never blocks: the calling thread is one of gRPC's few.
class ForwardReactor final : public grpc::ServerUnaryReactor {
 public:
  // `request` and `response` live until OnDone.
  ForwardReactor(const ForwardEnvironment& environment, grpc::CallbackServerContext* context,
                 grpc::ByteBuffer* request, grpc::ByteBuffer* response);

  // Once, before the reactor is given to gRPC.
  void Start();

  void OnCancel() override;
  void OnDone() override;

 private:
  ~ForwardReactor() override = default;
  // Decodes, checks and submits; `may_run_inline` on gRPC's own thread.
  void Run(absl::StatusOr<const ServingBackend*> backend, bool may_run_inline);
  void Submit(ValidForward valid, bool may_run_inline);
  // The answer to validate_only.
  void Validated(ValidForward valid);
  void Complete(absl::StatusOr<ForwardResult> result);
  // The end: after it gRPC may delete this at any time, unless a reference is held.
  void Answer(absl::StatusOr<grpc::ByteBuffer> response);
  // Of memory for the answer; RESOURCE_EXHAUSTED.
  absl::Status Reserve(const ValidForward& valid);
  void Release();
  void Unref();

  const ForwardEnvironment& environment_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const request_;
  grpc::ByteBuffer* const response_;
  const absl::Time arrival_;
  const absl::Time deadline_;
  const ServingBackend* backend_ = nullptr;
  ForwardAnswerInfo info_;
  std::string request_id_;
  ServingState::WaitId wait_id_ = 0;
  std::shared_ptr<CallCanceller> canceller_;  // null: nothing is reserved
  UnsentAnswers::Id answer_room_ = 0;

  std::mutex mutex_;
  bool cancelled_ = false;
  ForwardCallId call_id_ = 0;
  bool submitted_ = false;

  // gRPC's, until OnDone, and one of each function here that uses `this` after the answer may have
  // gone.
  std::atomic<int> num_refs_{1};
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_FORWARD_REACTOR_H_
