#include "server/rpc/explain_reactor.h"

#include <utility>

#include "grpcpp/server_context.h"
#include "kernels/base/steady_now.h"
#include "server/ops/call_error.h"
#include "server/rpc/explain.h"
#include "server/rpc/forward_encoder.h"
#include "server/rpc/status_mapping.h"

namespace expertmesh {
ExplainReactor::ExplainReactor(const ForwardEnvironment& environment,
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

void ExplainReactor::OnDone() {
  environment_.open_calls->End();
  delete this;
}

void ExplainReactor::Start() {
  environment_.metrics->calls_in_flight[static_cast<int>(CallMethod::kExplain)].Add(1);
  if (!request_->Valid()) return Answer(MissingMessageError(deadline_));
  // gRPC learns of this reactor, and so may delete it, only after Start.
  wait_id_ = environment_.state->Wait(
      deadline_, static_cast<int64_t>(request_->Length()),
      [this](absl::StatusOr<const ServingBackend*> backend) {
        if (!backend.ok()) return Answer(backend.status());
        if (environment_.explain_queue->Push(
                static_cast<int64_t>(request_->Length()), deadline_,
                [this, served = *backend](absl::Status status) {
                  if (status.ok()) status = UnwantedError(context_->IsCancelled(), deadline_);
                  Answer(status.ok() ? Explain(*served) : std::move(status));
                }) == 0) {
          Answer(CallError(ErrorReason::kQueueFull, "too many explanations wait"));
        }
      });
}

absl::StatusOr<grpc::ByteBuffer> ExplainReactor::Explain(const ServingBackend& backend) {
  Allocator* const allocator = backend.group->request_allocator();
  absl::StatusOr<DecodedExplainRequest> request = DecodeExplainRequest(
      request_, environment_.decode_limits,
      [allocator](int64_t size_bytes) { return AllocatePayload(allocator, size_bytes); });
  request_->Clear();
  if (!request.ok()) return request.status();
  if (!request->has_request) return InvalidFieldError("request", "not set", "a ForwardRequest");
  absl::StatusOr<ValidForward> valid = backend.validator->Validate(std::move(request->request));
  if (!valid.ok()) return valid.status();
  const ForwardCall& call = *valid->call;
  ExplainParams params;
  params.forward = &*valid;
  params.routers = backend.routers;
  params.placement = backend.group->placement(call.model->name, call.layer->index);
  params.epoch = backend.group->epoch();
  params.max_tokens = request->max_tokens;
  params.max_step_tokens = backend.max_step_tokens;
  params.max_rank_pairs = backend.max_rank_pairs;
  params.max_num_tokens = backend.max_num_tokens;
  params.remote_ranks = backend.group->is_remote();
  absl::StatusOr<v1::ExplainResponse> response = ExplainForward(params);
  if (!response.ok()) return response.status();
  return EncodeSmallMessage(*response);
}

void ExplainReactor::Answer(absl::StatusOr<grpc::ByteBuffer> response) {
  const ServerMetrics& metrics = *environment_.metrics;
  if (response.ok()) response_->Swap(&*response);
  const grpc::Status answer = ToGrpcStatus(response.status());
  metrics.CountCall(CallMethod::kExplain, static_cast<absl::StatusCode>(answer.error_code()),
                    absl::ToDoubleSeconds(SteadyNow() - arrival_));
  metrics.calls_in_flight[static_cast<int>(CallMethod::kExplain)].Add(-1);
  Finish(answer);
}

// An explanation that runs already is finished, though nobody reads it; UnwantedError sees the
// others.
void ExplainReactor::OnCancel() { environment_.state->CancelWait(wait_id_); }

}  // namespace expertmesh
