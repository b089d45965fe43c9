#include "server/rpc/forward_stream_reactor.h"

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "expertmesh/v1/expert_service.pb.h"
#include "kernels/base/steady_now.h"
#include "server/ops/call_error.h"
#include "server/rpc/forward_encoder.h"
#include "server/rpc/forward_response.h"
#include "server/rpc/forward_stream_envelope.h"
#include "server/rpc/grpc_deadline.h"
#include "server/rpc/status_mapping.h"
#include "server/rpc/validate_only.h"

namespace expertmesh {
namespace {

// What the answer's elements will take.
int64_t OutputBytes(const ValidForward& valid) {
  if (valid.stats_only || valid.validate_only) return 0;
  const ForwardCall& call = *valid.call;
  return call.num_tokens * call.model->hidden_size *
         (valid.output_as_values ? int64_t{4} : DTypeBytes(call.output_dtype));
}

// The same message in memory of its own.
void CopyToOwnMemory(grpc::ByteBuffer* message) {
  grpc::Slice slice;
  if (!message->DumpToSingleSlice(&slice).ok()) return;
  // A single slice is not copied by Dump.
  const grpc::Slice copy(slice.begin(), slice.size());
  grpc::ByteBuffer own(&copy, 1);
  message->Swap(&own);
}

}  // namespace

struct ForwardStreamReactor::Message final : ForwardStreamMessage {
  grpc::ByteBuffer bytes;  // the request until it is decoded, the answer once there is one
  absl::Time arrival;
  absl::Time deadline;
  const ServingBackend* backend = nullptr;
  ForwardAnswerInfo info;
  std::string request_id;
  UnsentAnswers::Id answer_room = 0;  // 0: none

  // Under the stream's mutex.
  bool cancelled = false;
  ServingState::WaitId wait_id = 0;
  std::optional<ForwardCallId> call_id;
  ExplainQueue::Id validation_id = 0;
};

ForwardStreamReactor::ForwardStreamReactor(const ForwardEnvironment& environment,
                                           ForwardStreamSet* streams,
                                           grpc::CallbackServerContext* context)
    : environment_(environment),
      streams_(streams),
      stream_deadline_(FromGrpcDeadline(context->deadline())),
      canceller_(std::make_shared<CallCanceller>(context)),
      state_(streams->limits().max_stream_bytes, streams->total()) {}

ForwardStreamReactor* ForwardStreamReactor::Start(const ForwardEnvironment& environment,
                                                  ForwardStreamSet* streams,
                                                  grpc::CallbackServerContext* context) {
  auto reactor = std::shared_ptr<ForwardStreamReactor>(
      new ForwardStreamReactor(environment, streams, context));
  reactor->self_ = reactor;
  environment.open_calls->Begin();
  streams->Add(reactor);
  reactor->Pump();
  return reactor.get();
}

void ForwardStreamReactor::EndWhenAnswered() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_.EndWhenAnswered(
        CallError(ErrorReason::kDraining, "this server is stopping; another one may answer"));
  }
  Pump();
}

void ForwardStreamReactor::Pump() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (pumping_) return;
  pumping_ = true;
  for (;;) {
    switch (state_.Next()) {
      case ForwardStreamState::Action::kNone:
        pumping_ = false;
        return;
      case ForwardStreamState::Action::kRead:
        lock.unlock();
        StartRead(&read_);
        break;
      case ForwardStreamState::Action::kWrite: {
        const auto* message = static_cast<const Message*>(state_.writing().get());
        grpc::WriteOptions options;
        // Small ones then share a packet and a system call.
        if (state_.may_keep_back()) options.set_buffer_hint();
        lock.unlock();
        if (message->answer_room != 0) {
          environment_.unsent_stream_answers->StartSending(message->answer_room);
        }
        // gRPC reads `bytes` until OnWriteDone, which lets go of the message.
        StartWrite(&message->bytes, options);
        break;
      }
      case ForwardStreamState::Action::kFinish: {
        const grpc::Status status = ToGrpcStatus(state_.final_status());
        lock.unlock();
        Finish(status);
        break;
      }
    }
    lock.lock();
  }
}

void ForwardStreamReactor::OnReadDone(bool ok) {
  if (!ok) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      state_.OnReadDone(false);
    }
    return Pump();
  }
  auto message = std::make_shared<Message>();
  message->arrival = SteadyNow();
  message->bytes.Swap(&read_);
  const auto size_bytes = static_cast<int64_t>(message->bytes.Length());
  environment_.metrics->request_bytes.Increment(size_bytes);
  const absl::StatusOr<ForwardStreamEnvelope> envelope = ReadForwardStreamEnvelope(&message->bytes);
  absl::Status error = envelope.status();
  bool admitted = false;
  bool alone = false;
  MessagePtr to_cancel;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_.OnReadDone(true);
    if (error.ok()) {
      message->stream_seq = envelope->stream_seq;
      if (envelope->cancel) {
        to_cancel = std::static_pointer_cast<Message>(state_.FindRunning(envelope->stream_seq));
      } else if (state_.Admit(message, size_bytes)) {
        admitted = true;
        alone = state_.num_running() == 1;
      } else if (!state_.ended()) {
        error = InvalidFieldError("stream_seq", envelope->stream_seq,
                                  "a number that is not in flight on this stream");
      }
    }
  }
  if (admitted)
    environment_.metrics->calls_in_flight[static_cast<int>(CallMethod::kForwardStream)].Add(1);
  if (!error.ok()) {
    environment_.metrics->CountCall(CallMethod::kForwardStream, error.code(), 0);
    return End(std::move(error));
  }
  // The next message is read while this one is worked on.
  Pump();
  if (to_cancel != nullptr) Cancel(to_cancel.get());
  if (admitted) Process(message, envelope->timeout_micros, alone);
}

void ForwardStreamReactor::OnWriteDone(bool ok) {
  std::shared_ptr<ForwardStreamMessage> message;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    message = state_.OnWriteDone();
    Release(message.get());
  }
  // The answer's slices hold the step's buffers.
  message.reset();
  if (!ok) return End(CallError(ErrorReason::kCallCancelled, "the stream is broken"));
  Pump();
}

void ForwardStreamReactor::OnCancel() {
  End(CallError(ErrorReason::kCallCancelled, "the client cancelled the stream"));
}

void ForwardStreamReactor::OnDone() {
  canceller_->Forget();
  streams_->Remove(this);
  environment_.open_calls->End();
  // Whoever is about to leave Pump has a reference of its own.
  const std::shared_ptr<ForwardStreamReactor> self = std::move(self_);
}

void ForwardStreamReactor::End(absl::Status status) {
  ForwardStreamState::Ended ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended = state_.End(std::move(status));
  }
  for (const ForwardStreamState::MessagePtr& message : ended.running) {
    Cancel(static_cast<Message*>(message.get()));
  }
  // Before the stream may be told to have ended.
  for (const ForwardStreamState::MessagePtr& message : ended.dropped) Release(message.get());
  ended = {};
  Pump();
}

void ForwardStreamReactor::Cancel(Message* message) {
  ServingState::WaitId wait_id;
  std::optional<ForwardCallId> call_id;
  ExplainQueue::Id validation_id;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    message->cancelled = true;
    validation_id = message->validation_id;
    wait_id = message->wait_id;
    call_id = message->call_id;
  }
  // What is not there yet sees `cancelled` when it comes.
  if (call_id.has_value()) {
    message->backend->controller->Cancel(*call_id);
  } else if (validation_id != 0) {
    environment_.explain_queue->Cancel(validation_id);
  } else if (wait_id != 0) {
    environment_.state->CancelWait(wait_id);
  }
}

void ForwardStreamReactor::Release(ForwardStreamMessage* message) {
  auto& room = static_cast<Message*>(message)->answer_room;
  if (room != 0) environment_.unsent_stream_answers->Release(room);
  room = 0;
}

void ForwardStreamReactor::Process(const MessagePtr& message, int64_t timeout_micros, bool alone) {
  message->deadline = std::min(stream_deadline_, message->arrival + environment_.max_deadline);
  if (timeout_micros < 0) {
    return Answer(message, InvalidFieldError("timeout_micros", timeout_micros, "0 or more"));
  }
  if (timeout_micros > 0) {
    message->deadline =
        std::min(message->deadline, message->arrival + absl::Microseconds(timeout_micros));
  }
  const auto size_bytes = static_cast<int64_t>(message->bytes.Length());
  // A step may run on this thread, which is gRPC's own; later the waiter comes from another one.
  // Only for a message alone: what comes behind it would be a step each instead of one.
  const ServingState::WaitId wait_id = environment_.state->Wait(
      message->deadline, size_bytes,
      [self = shared_from_this(), message, alone,
       here = std::this_thread::get_id()](absl::StatusOr<const ServingBackend*> backend) {
        self->Run(message, std::move(backend), alone && std::this_thread::get_id() == here);
      });
  if (wait_id == 0) return;
  bool cancelled;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    message->wait_id = wait_id;
    cancelled = message->cancelled;
  }
  if (cancelled) environment_.state->CancelWait(wait_id);
}

void ForwardStreamReactor::Run(const MessagePtr& message,
                               absl::StatusOr<const ServingBackend*> backend, bool may_run_inline) {
  const std::shared_ptr<ForwardStreamReactor> self = shared_from_this();
  if (!backend.ok()) return Answer(message, backend.status());
  message->backend = *backend;
  Allocator* const allocator = message->backend->group->request_allocator();
  absl::StatusOr<DecodedForwardStreamRequest> decoded = DecodeForwardStreamRequest(
      &message->bytes, environment_.decode_limits,
      [allocator](int64_t size_bytes) { return AllocatePayload(allocator, size_bytes); });
  // The payload has been gathered: its slices are needed no more.
  message->bytes.Clear();
  if (!decoded.ok()) return Answer(message, decoded.status());
  if (!decoded->has_request) {
    return Answer(message, InvalidFieldError("request", "not set", "a ForwardRequest"));
  }
  DecodedForwardRequest& request = decoded->request;
  environment_.metrics->copied_bytes.Increment(request.payload_bytes_copied);
  if (request.request_id.empty()) {
    request.request_id =
        absl::StrFormat("%016x-%d", message->backend->group->incarnation(),
                        environment_.next_request_number->fetch_add(1, std::memory_order_relaxed));
  }
  message->request_id = request.request_id;
  absl::StatusOr<ValidForward> valid = message->backend->validator->Validate(std::move(request));
  if (!valid.ok()) return Answer(message, valid.status());
  message->info = AnswerInfoOf(*valid);
  environment_.metrics->request_tokens.Increment(message->info.num_tokens);
  if (valid->validate_only) return Validate(message, *std::move(valid));
  Submit(message, std::move(*valid), may_run_inline);
}

void ForwardStreamReactor::Validate(const MessagePtr& message, ValidForward valid) {
  const std::shared_ptr<ForwardStreamReactor> self = shared_from_this();
  const ExplainQueue::Id id = ValidateRouting(
      std::move(valid.call), *message->backend, environment_.explain_queue, message->deadline,
      [self, message] {
        const std::lock_guard<std::mutex> lock(self->mutex_);
        return UnwantedError(message->cancelled, message->deadline);
      },
      [self, message](absl::Status status) {
        self->Answer(message, status.ok() ? EncodeValidated(message->info, *message->backend,
                                                            message->stream_seq)
                                          : absl::StatusOr<grpc::ByteBuffer>(std::move(status)));
      });
  bool cancelled;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    message->validation_id = id;
    cancelled = message->cancelled;
  }
  if (cancelled && id != 0) environment_.explain_queue->Cancel(id);
}

void ForwardStreamReactor::Submit(const MessagePtr& message, ValidForward valid,
                                  bool may_run_inline) {
  if (const int64_t bytes = OutputBytes(valid); bytes > 0) {
    // What the message's deadline leaves of the answer is still to be read.
    absl::StatusOr<UnsentAnswers::Id> room = environment_.unsent_stream_answers->Reserve(
        bytes + ForwardStreamState::kMessageOverheadBytes,
        message->deadline + UnsentAnswers::kLeastTimeToRead, canceller_);
    if (!room.ok()) return Answer(message, room.status());
    message->answer_room = *room;
  }
  valid.call->deadline = message->deadline;
  valid.call->done = [self = shared_from_this(), message](absl::StatusOr<ForwardResult> result) {
    self->Complete(message, std::move(result));
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_.ExpectAnswer(message.get(), OutputBytes(valid));
  }
  ForwardController* const controller = message->backend->controller;
  const ForwardCallId id = controller->Submit(std::move(valid.call), may_run_inline);
  bool cancelled;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    message->call_id = id;
    cancelled = message->cancelled;
  }
  if (cancelled) controller->Cancel(id);
}

void ForwardStreamReactor::Complete(const MessagePtr& message,
                                    absl::StatusOr<ForwardResult> result) {
  if (!result.ok()) return Answer(message, result.status());
  Answer(message, EncodeAnswer(message->info, *message->backend, std::move(*result),
                               SteadyNow() - message->arrival,
                               message->backend->group->request_allocator(), message->stream_seq));
}

void ForwardStreamReactor::Answer(const MessagePtr& message,
                                  absl::StatusOr<grpc::ByteBuffer> response) {
  google::rpc::Status error;
  absl::Status status;
  if (!response.ok()) {
    status = NameServersDeadline(response.status(), message->arrival, message->deadline,
                                 environment_.max_deadline);
    v1::ForwardStreamResponse answer;
    answer.set_stream_seq(message->stream_seq);
    *answer.mutable_error() = error = ToRpcStatus(status);
    response = EncodeSmallMessage(answer);
  }
  const auto size_bytes = static_cast<int64_t>(response->Length());
  bool copy;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    copy = state_.ShouldCopyAnswer();
  }
  if (copy) CopyToOwnMemory(&*response);
  message->bytes.Swap(&*response);
  // Before the answer may be out: then gRPC may take the stream for ended, and its server with it.
  environment_.metrics->response_bytes.Increment(size_bytes);
  environment_.answered->Count({.method = CallMethod::kForwardStream,
                                .request_id = message->request_id,
                                .stream_seq = message->stream_seq,
                                .num_tokens = message->info.num_tokens,
                                .elapsed = SteadyNow() - message->arrival,
                                .status = std::move(status),
                                .code = static_cast<absl::StatusCode>(error.code())});
  bool wanted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    wanted = state_.OnAnswer(message, size_bytes);
    if (!wanted || error.code() != 0) Release(message.get());
  }
  if (!wanted) message->bytes.Clear();
  Pump();
}

}  // namespace expertmesh
