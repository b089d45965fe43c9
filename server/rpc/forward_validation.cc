#include "server/rpc/forward_validation.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/checked_math.h"
#include "server/ops/call_error.h"
#include "server/rpc/routing_validation.h"
#include "server/rpc/tensor_validation.h"
#include "server/rpc/wire_enums.h"

namespace expertmesh {
namespace {

constexpr DType kRealDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

absl::Status FieldError(ErrorReason reason, absl::string_view message, std::string field,
                        std::string value, std::string limit) {
  CallErrorDetails details;
  details.field = std::move(field);
  details.value = std::move(value);
  details.limit = std::move(limit);
  return CallError(reason, message, std::move(details));
}

std::string NamesOf(const std::vector<const ModelSpec*>& models) {
  return absl::StrJoin(models, ", ", [](std::string* out, const ModelSpec* model) {
    absl::StrAppend(out, model->name);
  });
}

std::string LayersOf(const ModelSpec& model) {
  constexpr size_t kMost = 8;
  std::string text = absl::StrCat(model.layers.size(), " MoE layers");
  for (size_t i = 0; i < std::min(kMost, model.layers.size()); ++i) {
    absl::StrAppend(&text, i == 0 ? ": " : ", ", model.layers[i].index);
  }
  if (model.layers.size() > kMost) {
    absl::StrAppend(&text, ", … ", model.layers.back().index);
  }
  return text;
}

// DATA_TYPE_UNSPECIFIED is `otherwise`.
absl::StatusOr<DType> RealDType(v1::DataType wire, absl::string_view field, DType otherwise) {
  if (wire == v1::DATA_TYPE_UNSPECIFIED) return otherwise;
  const DType dtype = DTypeFromWire(wire);
  if (IsActivationDType(dtype)) return dtype;
  return InvalidFieldError(
      field, v1::DataType_IsValid(wire) ? v1::DataType_Name(wire) : absl::StrCat(int{wire}),
      "float32, float16, bfloat16");
}

absl::StatusOr<CombineMode> ToCombineMode(v1::Combine wire) {
  switch (wire) {
    case v1::COMBINE_UNSPECIFIED:
    case v1::COMBINE_PER_OWNER:
      return CombineMode::kSum;
    case v1::COMBINE_PER_EXPERT:
      return CombineMode::kPerExpert;
    default:
      return InvalidFieldError("options.combine", int{wire},
                               "COMBINE_PER_OWNER, COMBINE_PER_EXPERT");
  }
}

absl::StatusOr<DispatchMode> ToDispatchMode(v1::DispatchMode wire, const ForwardLimits& limits) {
  if (wire == v1::DISPATCH_MODE_UNSPECIFIED || wire == v1::DISPATCH_MODE_AUTO) {
    return limits.dispatch;
  }
  std::string names;
  for (const DispatchMode mode : limits.strategies) {
    if (DispatchModeToWire(mode) != wire) {
      absl::StrAppend(&names, ", ", v1::DispatchMode_Name(DispatchModeToWire(mode)));
      continue;
    }
    if (limits.allow_dispatch_option) return mode;
    return FieldError(ErrorReason::kOptionDisabled,
                      "options.dispatch is for debugging and off here; the server's flag "
                      "--allow_dispatch_option turns it on",
                      "options.dispatch", v1::DispatchMode_Name(wire), "--allow_dispatch_option");
  }
  return InvalidFieldError(
      "options.dispatch",
      v1::DispatchMode_IsValid(wire) ? v1::DispatchMode_Name(wire) : absl::StrCat(int{wire}),
      absl::StrCat("a strategy of this group: DISPATCH_MODE_AUTO", names));
}

absl::Status ApplyOptions(const v1::ForwardOptions& options, DType hidden_dtype,
                          const ForwardLimits& limits, ValidForward* valid) {
  ForwardCall& call = *valid->call;
  absl::StatusOr<DType> output_dtype =
      RealDType(options.output_dtype(), "options.output_dtype", hidden_dtype);
  if (!output_dtype.ok()) return output_dtype.status();
  absl::StatusOr<DType> combine_dtype =
      RealDType(options.combine_dtype(), "options.combine_dtype", *output_dtype);
  if (!combine_dtype.ok()) return combine_dtype.status();
  absl::StatusOr<CombineMode> combine = ToCombineMode(options.combine());
  if (!combine.ok()) return combine.status();
  absl::StatusOr<DispatchMode> dispatch = ToDispatchMode(options.dispatch(), limits);
  if (!dispatch.ok()) return dispatch.status();
  if (!v1::OutputFormat_IsValid(options.output_format())) {
    return InvalidFieldError("options.output_format", int{options.output_format()},
                             "OUTPUT_FORMAT_DATA, OUTPUT_FORMAT_VALUES");
  }
  if (options.include_shared_experts() && call.layer->shared_intermediate_size == 0) {
    return FieldError(ErrorReason::kNoSharedExperts,
                      absl::StrCat("layer ", call.layer->index, " has no shared experts"),
                      "options.include_shared_experts", "true", "false");
  }
  call.output_dtype = *output_dtype;
  call.combine_dtype = *combine_dtype;
  call.combine = *combine;
  call.dispatch = *dispatch;
  call.include_shared_experts = options.include_shared_experts();
  valid->stats_only = options.stats_only();
  valid->validate_only = options.validate_only();
  return absl::OkStatus();
}

// Where the request does not choose, the server's choice gives way to what the call asks for.
void LetDispatchGiveWay(const v1::ForwardOptions& options, ForwardCall& call) {
  // The other form of the same, where there is nothing to route.
  if (call.dispatch == DispatchMode::kAllGatherReduceScatterMonolithic &&
      call.routing == RoutingKind::kTopK) {
    call.dispatch = DispatchMode::kAllGatherReduceScatter;
  }
  if (options.dispatch() != v1::DISPATCH_MODE_UNSPECIFIED &&
      options.dispatch() != v1::DISPATCH_MODE_AUTO) {
    return;
  }
  const bool no_source_rank = call.dispatch == DispatchMode::kDirect && call.include_shared_experts;
  // The memory for slots is meant for the model's own top-k.
  const bool too_wide =
      call.dispatch == DispatchMode::kAllToAllFixedCapacity && call.topk > call.layer->topk;
  if (no_source_rank || too_wide) call.dispatch = DispatchMode::kAuto;
}

absl::Status CheckFingerprint(const std::string& expected, const ModelSpec& model) {
  if (expected.empty() || expected == model.fingerprint) return absl::OkStatus();
  absl::Status status = InvalidFieldError("expected_fingerprint", expected, model.fingerprint);
  CallErrorDetails details = GetCallErrorDetails(status).value_or(CallErrorDetails{});
  return CallError(ErrorReason::kFingerprintMismatch,
                   absl::StrCat("the loaded experts of ", model.name,
                                " are not those expected: ", absl::string_view(status.message())),
                   std::move(details));
}

}  // namespace

absl::Status NoModelOfThatName(const std::string& name, const std::string& served) {
  // Escapes the name, which may be anything.
  CallErrorDetails details = GetCallErrorDetails(InvalidFieldError("model", name, served)).value();
  if (name.empty()) {
    return CallError(ErrorReason::kInvalidField,
                     absl::StrCat("model is required: several are served: ", served), details);
  }
  return CallError(ErrorReason::kModelNotFound,
                   absl::StrCat("no model '", details.value, "' here; served: ", served), details);
}

ForwardValidator::ForwardValidator(std::vector<const ModelSpec*> models, ForwardLimits limits,
                                   Allocator* allocator)
    : models_(std::move(models)), limits_(std::move(limits)), allocator_(allocator) {}

absl::StatusOr<const ModelSpec*> ForwardValidator::FindModel(const std::string& name) const {
  if (name.empty() && models_.size() == 1) return models_.front();
  for (const ModelSpec* model : models_) {
    if (model->name == name) return model;
  }
  return NoModelOfThatName(name, NamesOf(models_));
}

absl::StatusOr<ValidForward> ForwardValidator::Validate(DecodedForwardRequest request) const {
  absl::StatusOr<const ModelSpec*> model = FindModel(request.model);
  if (!model.ok()) return model.status();
  absl::Status status = CheckFingerprint(request.expected_fingerprint, **model);
  if (!status.ok()) return status;
  const LayerSpec* layer = (*model)->FindLayer(request.layer);
  if (layer == nullptr) {
    return FieldError(ErrorReason::kLayerNotFound,
                      absl::StrCat("layer ", request.layer, " of ", (*model)->name,
                                   " does not exist or is dense; it has ", LayersOf(**model)),
                      "layer", absl::StrCat(request.layer), LayersOf(**model));
  }
  if (!request.adapters.empty()) {
    CallErrorDetails details =
        GetCallErrorDetails(InvalidFieldError("adapters[0]", request.adapters[0], "none")).value();
    return CallError(ErrorReason::kAdapterNotFound,
                     absl::StrCat("no adapter '", details.value, "' is loaded"), details);
  }

  ValidForward valid;
  valid.model_name = (*model)->name;
  valid.call = std::make_unique<ForwardCall>();
  ForwardCall& call = *valid.call;
  call.model = *model;
  call.layer = layer;
  call.request_id = std::move(request.request_id);

  MatrixRules hidden_rules;
  hidden_rules.field = "hidden_states";
  hidden_rules.max_rows = limits_.max_request_tokens;
  hidden_rules.num_cols = (*model)->hidden_size;
  hidden_rules.dtypes = limits_.activation_dtypes;
  hidden_rules.dtype_of_values = DefaultActivationDType(**model);
  absl::StatusOr<ValidMatrix> hidden =
      ValidateMatrix(std::move(request.hidden_states), hidden_rules, allocator_);
  if (!hidden.ok()) return hidden.status();
  call.num_tokens = hidden->num_rows;
  call.activation_dtype = hidden->dtype;

  status = ApplyOptions(request.options, hidden->dtype, limits_, &valid);
  if (!status.ok()) return status;
  valid.output_as_values = request.options.output_format() == v1::OUTPUT_FORMAT_UNSPECIFIED
                               ? hidden->given_as_values
                               : request.options.output_format() == v1::OUTPUT_FORMAT_VALUES;
  const std::optional<int64_t> output_bytes =
      CheckedSizeProduct({call.num_tokens, (*model)->hidden_size,
                          valid.output_as_values ? int64_t{4} : DTypeBytes(call.output_dtype)});
  if (!output_bytes || *output_bytes > limits_.max_output_bytes) {
    return FieldError(ErrorReason::kMessageTooLarge,
                      "the answer would not fit one message; send fewer tokens at a time",
                      "hidden_states.shape[0]", absl::StrCat(output_bytes.value_or(0), " bytes"),
                      absl::StrCat(limits_.max_output_bytes, " bytes"));
  }
  status = ValidateAdapterIndex(request.adapter_index, call.num_tokens, 0);
  if (!status.ok()) return status;

  std::vector<RowRun> rows_read = {{0, call.num_tokens}};
  call.apply_router_weight_on_input = request.apply_router_weight_on_input;
  switch (request.routing_case) {
    case v1::ForwardRequest::kTopk: {
      absl::StatusOr<TopKSummary> summary = ValidateTopK(
          request.topk, request.topk_ids, request.topk_weights,
          {call.num_tokens, layer->num_experts, limits_.max_topk,
           call.apply_router_weight_on_input ? call.activation_dtype : DType::kFloat32});
      if (!summary.ok()) return summary.status();
      if (!call.include_shared_experts) rows_read = std::move(summary->rows_with_expert);
      valid.num_pairs = summary->num_pairs;
      valid.num_tokens_without_expert = summary->num_tokens_without_expert;
      call.routing = RoutingKind::kTopK;
      call.topk = request.topk;
      call.topk_ids = std::move(request.topk_ids);
      call.topk_weights = std::move(request.topk_weights);
      break;
    }
    case v1::ForwardRequest::kRouterLogits: {
      MatrixRules rules;
      rules.field = "router_logits";
      rules.num_rows = call.num_tokens;
      rules.max_rows = limits_.max_request_tokens;
      rules.num_cols = layer->num_experts + layer->router.num_zero_experts;
      rules.dtypes = kRealDTypes;
      absl::StatusOr<ValidMatrix> logits =
          ValidateMatrix(std::move(request.router_logits), rules, allocator_);
      if (!logits.ok()) return logits.status();
      call.routing = RoutingKind::kRouterLogits;
      call.topk = layer->topk;
      call.router_logits = std::move(logits->data);
      call.router_logits_dtype = logits->dtype;
      call.apply_router_weight_on_input |= (*model)->apply_router_weight_on_input;
      break;
    }
    case v1::ForwardRequest::kServerGate:
      if (!layer->has_gate) {
        return FieldError(ErrorReason::kNoGateWeights,
                          absl::StrCat("the checkpoint has no gate for layer ", layer->index,
                                       "; send topk or router_logits"),
                          "server_gate", "set", "topk or router_logits");
      }
      call.routing = RoutingKind::kServerGate;
      call.topk = layer->topk;
      call.apply_router_weight_on_input |= (*model)->apply_router_weight_on_input;
      break;
    default:
      return InvalidFieldError("routing", "not set", "one of topk, router_logits, server_gate");
  }

  LetDispatchGiveWay(request.options, call);
  status = CheckFiniteRows(*hidden, rows_read, "hidden_states");
  if (!status.ok()) return status;
  call.hidden_states = std::move(hidden->data);
  call.want_stats = valid.stats_only;
  valid.payload_bytes = call.hidden_states.size_bytes() + call.router_logits.size_bytes() +
                        call.topk_ids.size_bytes() + call.topk_weights.size_bytes();
  return valid;
}

}  // namespace expertmesh
