#include "server/rpc/forward_request_parser.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

constexpr uint32_t Varint(uint32_t field) {
  return WireReader::MakeTag(field, WireReader::kVarint);
}
constexpr uint32_t Fixed32(uint32_t field) {
  return WireReader::MakeTag(field, WireReader::kFixed32);
}
constexpr uint32_t Bytes(uint32_t field) {
  return WireReader::MakeTag(field, WireReader::kLengthDelimited);
}

template <typename Enum>
bool ReadEnum(WireReader* reader, Enum* value) {
  int32_t raw;
  if (!ReadInt32(reader, &raw)) return false;
  *value = static_cast<Enum>(raw);
  return true;
}

}  // namespace

bool ReadInt32(WireReader* reader, int32_t* value) {
  uint64_t raw;
  if (!reader->ReadVarint(&raw)) return false;
  *value = static_cast<int32_t>(raw);
  return true;
}

bool ReadInt64(WireReader* reader, int64_t* value) {
  uint64_t raw;
  if (!reader->ReadVarint(&raw)) return false;
  *value = static_cast<int64_t>(raw);
  return true;
}

bool ReadBool(WireReader* reader, bool* value) {
  uint64_t raw;
  if (!reader->ReadVarint(&raw)) return false;
  *value = raw != 0;
  return true;
}

bool ForwardRequestParser::Parse(WireReader* reader) {
  while (reader->remaining() > 0) {
    uint32_t tag;
    if (!reader->ReadTag(&tag) || !ParseField(reader, tag)) return false;
  }
  return true;
}

bool ForwardRequestParser::ParseField(WireReader* reader, uint32_t tag) {
  switch (tag) {
    case Bytes(v1::ForwardRequest::kRequestIdFieldNumber):
      return ParseString(reader, "request_id", limits_.max_request_id_bytes, &decoded_.request_id);
    case Bytes(v1::ForwardRequest::kModelFieldNumber):
      return ParseString(reader, "model", limits_.max_name_bytes, &decoded_.model);
    case Varint(v1::ForwardRequest::kLayerFieldNumber):
      return ReadInt32(reader, &decoded_.layer);
    case Bytes(v1::ForwardRequest::kTopkFieldNumber):
      SelectRouting(v1::ForwardRequest::kTopk);
      return ParseTopK(reader);
    case Bytes(v1::ForwardRequest::kRouterLogitsFieldNumber):
      SelectRouting(v1::ForwardRequest::kRouterLogits);
      return ParseTensor(reader, &router_logits_);
    case Bytes(v1::ForwardRequest::kServerGateFieldNumber):
      SelectRouting(v1::ForwardRequest::kServerGate);
      return ParseMessage(reader, [&](uint32_t inner) { return reader->SkipField(inner); });
    case Varint(v1::ForwardRequest::kApplyRouterWeightOnInputFieldNumber):
      return ReadBool(reader, &decoded_.apply_router_weight_on_input);
    case Bytes(v1::ForwardRequest::kOptionsFieldNumber):
      return ParseOptions(reader);
    case Bytes(v1::ForwardRequest::kAdaptersFieldNumber):
      if (static_cast<int64_t>(decoded_.adapters.size()) >= limits_.max_adapters) {
        limit_error_ =
            InvalidFieldError("adapters", absl::StrCat("more than ", limits_.max_adapters),
                              absl::StrCat("at most ", limits_.max_adapters));
        return false;
      }
      return ParseString(reader, "adapters", limits_.max_name_bytes,
                         &decoded_.adapters.emplace_back());
    case Bytes(v1::ForwardRequest::kAdapterIndexFieldNumber):
      return adapter_index_.AppendPacked32(reader);
    case Fixed32(v1::ForwardRequest::kAdapterIndexFieldNumber):
      return adapter_index_.Append(reader, 4);
    case Bytes(v1::ForwardRequest::kExpectedFingerprintFieldNumber):
      return ParseString(reader, "expected_fingerprint", limits_.max_name_bytes,
                         &decoded_.expected_fingerprint);
    case Bytes(v1::ForwardRequest::kHiddenStatesFieldNumber):
      return ParseTensor(reader, &hidden_states_);
    default:
      return reader->SkipField(tag);
  }
}

void ForwardRequestParser::SelectRouting(v1::ForwardRequest::RoutingCase routing_case) {
  if (decoded_.routing_case == routing_case) return;
  decoded_.routing_case = routing_case;
  decoded_.topk = 0;
  topk_ids_.Clear();
  topk_weights_.Clear();
  router_logits_.Clear();
}

bool ForwardRequestParser::ParseTopK(WireReader* reader) {
  return ParseMessage(reader, [&](uint32_t tag) {
    switch (tag) {
      case Varint(v1::TopK::kTopkFieldNumber):
        return ReadInt32(reader, &decoded_.topk);
      case Bytes(v1::TopK::kIdsFieldNumber):
        return topk_ids_.AppendPacked32(reader);
      case Fixed32(v1::TopK::kIdsFieldNumber):
        return topk_ids_.Append(reader, 4);
      case Bytes(v1::TopK::kWeightsFieldNumber):
        return topk_weights_.AppendPacked32(reader);
      case Fixed32(v1::TopK::kWeightsFieldNumber):
        return topk_weights_.Append(reader, 4);
      default:
        return reader->SkipField(tag);
    }
  });
}

bool ForwardRequestParser::ParseOptions(WireReader* reader) {
  v1::ForwardOptions& options = decoded_.options;
  const auto read_enum = [&](auto set) {
    int32_t value;
    if (!ReadInt32(reader, &value)) return false;
    set(value);
    return true;
  };
  const auto read_bool = [&](auto set) {
    bool value;
    if (!ReadBool(reader, &value)) return false;
    set(value);
    return true;
  };
  return ParseMessage(reader, [&](uint32_t tag) {
    switch (tag) {
      case Varint(v1::ForwardOptions::kOutputDtypeFieldNumber):
        return read_enum(
            [&](int32_t v) { options.set_output_dtype(static_cast<v1::DataType>(v)); });
      case Varint(v1::ForwardOptions::kCombineDtypeFieldNumber):
        return read_enum(
            [&](int32_t v) { options.set_combine_dtype(static_cast<v1::DataType>(v)); });
      case Varint(v1::ForwardOptions::kCombineFieldNumber):
        return read_enum([&](int32_t v) { options.set_combine(static_cast<v1::Combine>(v)); });
      case Varint(v1::ForwardOptions::kDispatchFieldNumber):
        return read_enum(
            [&](int32_t v) { options.set_dispatch(static_cast<v1::DispatchMode>(v)); });
      case Varint(v1::ForwardOptions::kIncludeSharedExpertsFieldNumber):
        return read_bool([&](bool v) { options.set_include_shared_experts(v); });
      case Varint(v1::ForwardOptions::kOutputFormatFieldNumber):
        return read_enum(
            [&](int32_t v) { options.set_output_format(static_cast<v1::OutputFormat>(v)); });
      case Varint(v1::ForwardOptions::kStatsOnlyFieldNumber):
        return read_bool([&](bool v) { options.set_stats_only(v); });
      case Varint(v1::ForwardOptions::kValidateOnlyFieldNumber):
        return read_bool([&](bool v) { options.set_validate_only(v); });
      default:
        return reader->SkipField(tag);
    }
  });
}

bool ForwardRequestParser::ParseTensor(WireReader* reader, TensorParser* tensor) {
  DecodedTensor& decoded = tensor->decoded;
  decoded.present = true;
  return ParseMessage(reader, [&](uint32_t tag) {
    switch (tag) {
      case Varint(v1::Tensor::kDtypeFieldNumber):
        return ReadEnum(reader, &decoded.dtype);
      case Varint(v1::Tensor::kShapeFieldNumber):
        return AppendDim(reader, tensor);
      case Bytes(v1::Tensor::kShapeFieldNumber): {
        int64_t outer_limit;
        if (!reader->EnterMessage(&outer_limit)) return false;
        while (reader->remaining() > 0) {
          if (!AppendDim(reader, tensor)) return false;
        }
        return reader->LeaveMessage(outer_limit);
      }
      case Bytes(v1::Tensor::kQuantizationFieldNumber):
        return ParseQuantization(reader, tensor);
      case Bytes(v1::Tensor::kValuesFieldNumber):
        return tensor->values.AppendPacked32(reader);
      case Fixed32(v1::Tensor::kValuesFieldNumber):
        return tensor->values.Append(reader, 4);
      case Bytes(v1::Tensor::kDataFieldNumber): {
        int64_t length;
        if (!reader->ReadLength(&length)) return false;
        tensor->data.Clear();
        return tensor->data.Append(reader, length);
      }
      default:
        return reader->SkipField(tag);
    }
  });
}

bool ForwardRequestParser::ParseQuantization(WireReader* reader, TensorParser* tensor) {
  DecodedTensor& decoded = tensor->decoded;
  decoded.has_quantization = true;
  return ParseMessage(reader, [&](uint32_t tag) {
    switch (tag) {
      case Varint(v1::Quantization::kGranularityFieldNumber):
        return ReadEnum(reader, &decoded.granularity);
      case Varint(v1::Quantization::kBlockKFieldNumber):
        return ReadInt32(reader, &decoded.block_k);
      case Bytes(v1::Quantization::kScalesFieldNumber):
        return tensor->scales.AppendPacked32(reader);
      case Fixed32(v1::Quantization::kScalesFieldNumber):
        return tensor->scales.Append(reader, 4);
      default:
        return reader->SkipField(tag);
    }
  });
}

bool ForwardRequestParser::AppendDim(WireReader* reader, TensorParser* tensor) {
  if (static_cast<int64_t>(tensor->decoded.shape.size()) >= limits_.max_shape_dims) {
    limit_error_ = InvalidFieldError(absl::StrCat(tensor->name, ".shape"),
                                     absl::StrCat("a list of more than ", limits_.max_shape_dims),
                                     "2 numbers");
    return false;
  }
  return ReadInt64(reader, &tensor->decoded.shape.emplace_back());
}

bool ForwardRequestParser::ParseString(WireReader* reader, absl::string_view field,
                                       int64_t max_bytes, std::string* text) {
  int64_t size;
  if (!reader->ReadUtf8(max_bytes, text, &size)) return false;
  if (size > max_bytes) {
    limit_error_ = InvalidFieldError(field, absl::StrCat("a text of ", size, " bytes"),
                                     absl::StrCat("at most ", max_bytes, " bytes"));
    return false;
  }
  return true;
}

absl::Status ForwardRequestParser::BeginFill(PayloadAllocator allocate) {
  decoded_ = DecodedForwardRequest();
  router_logits_.decoded = DecodedTensor();
  hidden_states_.decoded = DecodedTensor();
  for (Payload* payload : {&topk_ids_, &topk_weights_, &adapter_index_, &router_logits_.scales,
                           &router_logits_.values, &router_logits_.data, &hidden_states_.scales,
                           &hidden_states_.values, &hidden_states_.data}) {
    absl::Status status = payload->BeginFill(allocate);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

DecodedForwardRequest ForwardRequestParser::Take() {
  int64_t* const copied = &decoded_.payload_bytes_copied;
  decoded_.topk_ids = topk_ids_.Take(copied);
  decoded_.topk_weights = topk_weights_.Take(copied);
  decoded_.adapter_index = adapter_index_.Take(copied);
  decoded_.router_logits = router_logits_.Take(copied);
  decoded_.hidden_states = hidden_states_.Take(copied);
  return std::move(decoded_);
}

}  // namespace expertmesh
