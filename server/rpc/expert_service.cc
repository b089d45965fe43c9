#include "server/rpc/expert_service.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "expertmesh/v1/expert_service.grpc.pb.h"
#include "grpcpp/server_context.h"
#include "kernels/base/steady_now.h"
#include "server/ops/call_error.h"
#include "server/rpc/explain_reactor.h"
#include "server/rpc/forward_reactor.h"
#include "server/rpc/forward_stream_reactor.h"
#include "server/rpc/status_mapping.h"
#include "server/rpc/wire_enums.h"

namespace expertmesh {
namespace {

// Method by method: the raw form of a stream cannot stand on top of the typed one.
using V1 = v1::ExpertService;
using RawForward = V1::WithRawCallbackMethod_Forward<
    V1::WithRawCallbackMethod_ForwardStream<V1::WithCallbackMethod_GetModel<
        V1::WithCallbackMethod_ListModels<V1::WithRawCallbackMethod_Explain<V1::Service>>>>>;

class ExpertServiceImpl final : public RawForward {
 public:
  explicit ExpertServiceImpl(ExpertServiceOptions options)
      : options_(std::move(options)),
        answered_(options_.metrics),
        unsent_answers_(options_.max_unsent_answer_bytes, options_.metrics->unsent_answer_bytes),
        unsent_stream_answers_(2 * options_.streams->limits().max_all_bytes,
                               options_.metrics->unsent_stream_answer_bytes),
        explain_queue_(4 * options_.max_message_bytes) {
    forward_.state = options_.state;
    forward_.metrics = options_.metrics;
    forward_.answered = &answered_;
    forward_.decode_limits.max_message_bytes = options_.max_message_bytes;
    forward_.max_deadline = options_.max_deadline;
    forward_.next_request_number = &next_request_number_;
    forward_.explain_queue = &explain_queue_;
    forward_.unsent_answers = &unsent_answers_;
    forward_.unsent_stream_answers = &unsent_stream_answers_;
    forward_.open_calls = options_.open_calls;
    for (v1::GetModelResponse& model : options_.models) {
      v1::Limits* limits = model.mutable_limits();
      limits->set_max_request_bytes(options_.max_message_bytes);
      limits->set_max_step_tokens(options_.max_step_tokens);
      limits->set_max_deadline_micros(absl::ToInt64Microseconds(options_.max_deadline));
    }
  }

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override {
    // gRPC made the message for this call alone; const is its signature's.
    auto* reactor =
        new ForwardReactor(forward_, context, const_cast<grpc::ByteBuffer*>(request), response);
    reactor->Start();
    return reactor;
  }

  grpc::ServerUnaryReactor* Explain(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override {
    auto* reactor =
        new ExplainReactor(forward_, context, const_cast<grpc::ByteBuffer*>(request), response);
    reactor->Start();
    return reactor;
  }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ForwardStream(
      grpc::CallbackServerContext* context) override {
    return ForwardStreamReactor::Start(forward_, options_.streams, context);
  }

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override {
    const absl::Time arrival = SteadyNow();
    return Answer(context, CallMethod::kGetModel, FillModel(request->model(), response), arrival);
  }

  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const v1::ListModelsRequest*,
                                       v1::ListModelsResponse* response) override {
    const absl::Time arrival = SteadyNow();
    const bool ready = Ready();
    for (const v1::GetModelResponse& model : options_.models) {
      v1::ModelSummary* summary = response->add_models();
      summary->set_model(model.model());
      summary->set_architecture(model.architecture());
      summary->set_num_layers(model.layers_size());
      summary->set_hidden_size(model.hidden_size());
      summary->set_ready(ready);
    }
    return Answer(context, CallMethod::kListModels, absl::OkStatus(), arrival);
  }

 private:
  bool Ready() const {
    const ServingBackend* backend = options_.state->backend();
    return backend != nullptr && backend->group->epoch() != 0 && !options_.state->draining();
  }

  absl::Status FillModel(const std::string& name, v1::GetModelResponse* response) const {
    const v1::GetModelResponse* found = nullptr;
    std::string names;
    for (const v1::GetModelResponse& model : options_.models) {
      if (model.model() == name || (name.empty() && options_.models.size() == 1)) found = &model;
      absl::StrAppend(&names, names.empty() ? "" : ", ", model.model());
    }
    if (found == nullptr) return NoModelOfThatName(name, names);
    *response = *found;
    if (const ServingBackend* backend = options_.state->backend()) {
      for (const auto& [model, fingerprint] : backend->placement_fingerprints) {
        if (model->name == found->model()) response->set_placement_fingerprint(fingerprint);
      }
      response->set_incarnation(backend->group->incarnation());
      response->set_epoch(backend->group->epoch());
      response->set_instruction_set(backend->group->instruction_set());
      const DType weight_dtype = backend->group->weight_dtype(found->model());
      if (weight_dtype != DType::kInvalid) response->set_weight_dtype(DTypeToWire(weight_dtype));
    }
    response->set_ready(Ready());
    return absl::OkStatus();
  }

  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, CallMethod method,
                                   const absl::Status& status, absl::Time arrival) const {
    options_.metrics->CountCall(method, status.code(),
                                absl::ToDoubleSeconds(SteadyNow() - arrival));
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

  ExpertServiceOptions options_;
  std::atomic<uint64_t> next_request_number_{1};
  AnsweredCalls answered_;
  UnsentAnswers unsent_answers_;
  UnsentAnswers unsent_stream_answers_;
  ForwardEnvironment forward_;
  ExplainQueue explain_queue_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewExpertService(ExpertServiceOptions options) {
  return std::make_unique<ExpertServiceImpl>(std::move(options));
}

}  // namespace expertmesh
