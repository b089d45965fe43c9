#include "server/rpc/forward_reactor.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "grpcpp/server_context.h"
#include "kernels/base/steady_now.h"
#include "server/ops/call_error.h"
#include "server/rpc/grpc_deadline.h"
#include "server/rpc/status_mapping.h"
#include "server/rpc/validate_only.h"

namespace expertmesh {

absl::Time EffectiveDeadline(const grpc::CallbackServerContext& context, absl::Time arrival,
                             absl::Duration max_deadline) {
  // A call without a deadline has one in the year 2262.
  return std::min(FromGrpcDeadline(context.deadline()), arrival + max_deadline);
}

absl::Status UnwantedError(bool is_cancelled, absl::Time deadline) {
  if (SteadyNow() >= deadline) {
    return CallError(ErrorReason::kDeadlinePassed, "the call's deadline passed while it waited");
  }
  if (is_cancelled) {
    return CallError(ErrorReason::kCallCancelled, "the call was cancelled");
  }
  return absl::OkStatus();
}

absl::Status NameServersDeadline(absl::Status status, absl::Time arrival, absl::Time deadline,
                                 absl::Duration max_deadline) {
  if (!absl::IsDeadlineExceeded(status) || deadline < arrival + max_deadline) return status;
  const std::string limit = absl::FormatDuration(max_deadline);
  return CallError(ErrorReason::kDeadlinePassed,
                   absl::StrCat("the server's --max_deadline of ", limit, " passed"),
                   {.limit = limit});
}

absl::Status MissingMessageError(absl::Time deadline) {
  if (SteadyNow() >= deadline) {
    return CallError(ErrorReason::kDeadlinePassed, "the call's deadline passed before its message");
  }
  return CallError(ErrorReason::kCallCancelled, "the call ended before its message came");
}

absl::StatusOr<Buffer> AllocatePayload(Allocator* allocator, int64_t size_bytes) {
  absl::StatusOr<Buffer> buffer = allocator->Allocate(size_bytes);
  if (buffer.ok()) return buffer;
  return CallError(ErrorReason::kBuffersExhausted, "no memory for the request's payload just now");
}

ForwardReactor::ForwardReactor(const ForwardEnvironment& environment,
                               grpc::CallbackServerContext* context, grpc::ByteBuffer* request,
                               grpc::ByteBuffer* response)
    : environment_(environment),
      context_(context),
      request_(request),
      response_(response),
      arrival_(SteadyNow()),
      deadline_(EffectiveDeadline(*context, arrival_, environment.max_deadline)) {
  environment_.open_calls->Begin();
}

void ForwardReactor::Unref() {
  if (num_refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

void ForwardReactor::Start() {
  environment_.metrics->calls_in_flight[static_cast<int>(CallMethod::kForward)].Add(1);
  if (!request_->Valid()) return Answer(MissingMessageError(deadline_));
  environment_.metrics->request_bytes.Increment(static_cast<int64_t>(request_->Length()));
  num_refs_.fetch_add(1, std::memory_order_relaxed);
  // Called within Wait, the waiter runs on this thread, gRPC's own; later it comes from another
  // one.
  wait_id_ = environment_.state->Wait(
      deadline_, static_cast<int64_t>(request_->Length()),
      [this, here = std::this_thread::get_id()](absl::StatusOr<const ServingBackend*> backend) {
        Run(std::move(backend), std::this_thread::get_id() == here);
      });
  Unref();
}

void ForwardReactor::Run(absl::StatusOr<const ServingBackend*> backend, bool may_run_inline) {
  if (!backend.ok()) return Answer(backend.status());
  backend_ = *backend;
  Allocator* const allocator = backend_->group->request_allocator();
  absl::StatusOr<DecodedForwardRequest> request = DecodeForwardRequest(
      request_, environment_.decode_limits,
      [allocator](int64_t size_bytes) { return AllocatePayload(allocator, size_bytes); });
  // The payload has been gathered: its slices are needed no more.
  request_->Clear();
  if (!request.ok()) return Answer(request.status());
  environment_.metrics->copied_bytes.Increment(request->payload_bytes_copied);
  if (request->request_id.empty()) {
    request->request_id =
        absl::StrFormat("%016x-%d", backend_->group->incarnation(),
                        environment_.next_request_number->fetch_add(1, std::memory_order_relaxed));
  }
  request_id_ = request->request_id;
  absl::StatusOr<ValidForward> valid = backend_->validator->Validate(std::move(*request));
  if (!valid.ok()) return Answer(valid.status());
  info_ = AnswerInfoOf(*valid);
  environment_.metrics->request_tokens.Increment(info_.num_tokens);
  if (valid->validate_only) return Validated(std::move(*valid));
  Submit(std::move(*valid), may_run_inline);
}

absl::Status ForwardReactor::Reserve(const ValidForward& valid) {
  if (valid.stats_only) return absl::OkStatus();
  // No product overflows: the validator bounds the answer's size.
  const int64_t bytes = info_.num_tokens * info_.model->hidden_size *
                        (info_.output_as_values ? int64_t{4} : DTypeBytes(info_.output_dtype));
  auto canceller = std::make_shared<CallCanceller>(context_);
  const absl::StatusOr<UnsentAnswers::Id> room = environment_.unsent_answers->Reserve(
      bytes + UnsentAnswers::kCallOverheadBytes, deadline_, canceller);
  if (!room.ok()) return room.status();
  answer_room_ = *room;
  canceller_ = std::move(canceller);
  return absl::OkStatus();
}

void ForwardReactor::Release() {
  if (canceller_ == nullptr) return;
  canceller_->Forget();
  environment_.unsent_answers->Release(answer_room_);
  canceller_ = nullptr;
}

void ForwardReactor::Submit(ValidForward valid, bool may_run_inline) {
  if (absl::Status status = Reserve(valid); !status.ok()) return Answer(std::move(status));
  valid.call->deadline = deadline_;
  valid.call->done = [this](absl::StatusOr<ForwardResult> result) { Complete(std::move(result)); };
  num_refs_.fetch_add(1, std::memory_order_relaxed);
  const ForwardCallId id = backend_->controller->Submit(std::move(valid.call), may_run_inline);
  bool cancel;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    call_id_ = id;
    submitted_ = true;
    cancel = cancelled_;
  }
  if (cancel) backend_->controller->Cancel(id);
  Unref();
}

void ForwardReactor::Validated(ValidForward valid) {
  ValidateRouting(
      std::move(valid.call), *backend_, environment_.explain_queue, deadline_,
      [this] { return UnwantedError(context_->IsCancelled(), deadline_); },
      [this](absl::Status status) {
        Answer(status.ok() ? EncodeValidated(info_, *backend_)
                           : absl::StatusOr<grpc::ByteBuffer>(std::move(status)));
      });
}

void ForwardReactor::Complete(absl::StatusOr<ForwardResult> result) {
  if (!result.ok()) return Answer(result.status());
  Answer(EncodeAnswer(info_, *backend_, std::move(*result), SteadyNow() - arrival_,
                      backend_->group->request_allocator()));
}

void ForwardReactor::Answer(absl::StatusOr<grpc::ByteBuffer> response) {
  absl::Status status = response.status();
  // A client's deadline reaches us as a cancellation.
  if (absl::IsCancelled(status) && SteadyNow() >= deadline_) {
    status = CallError(ErrorReason::kDeadlinePassed, "the call's deadline passed");
  }
  status = NameServersDeadline(std::move(status), arrival_, deadline_, environment_.max_deadline);
  if (response.ok()) {
    environment_.metrics->response_bytes.Increment(static_cast<int64_t>(response->Length()));
    response_->Swap(&*response);
    if (canceller_ != nullptr) environment_.unsent_answers->StartSending(answer_room_);
  } else {
    Release();
  }
  const grpc::Status answer = ToGrpcStatus(status);
  environment_.answered->Count({.method = CallMethod::kForward,
                                .request_id = request_id_,
                                .num_tokens = info_.num_tokens,
                                .elapsed = SteadyNow() - arrival_,
                                .status = std::move(status),
                                .code = static_cast<absl::StatusCode>(answer.error_code())});
  Finish(answer);
}

void ForwardReactor::OnCancel() {
  environment_.state->CancelWait(wait_id_);
  bool submitted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    submitted = submitted_;
  }
  if (submitted) backend_->controller->Cancel(call_id_);
}

void ForwardReactor::OnDone() {
  // The answer's slices hold the step's buffers.
  response_->Clear();
  Release();
  environment_.open_calls->End();
  Unref();
}

}  // namespace expertmesh
