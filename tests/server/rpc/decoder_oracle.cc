#include "tests/server/rpc/decoder_oracle.h"

#include <cstring>

#include "server/rpc/forward_decoder.h"

namespace expertmesh {
namespace {

ForwardDecodeLimits NoLimits() {
  ForwardDecodeLimits limits;
  limits.max_request_id_bytes = limits.max_name_bytes = 1 << 20;
  limits.max_adapters = limits.max_shape_dims = 1 << 20;
  return limits;
}

template <typename T, typename Field>
void CopyElements(const Buffer& buffer, Field* field) {
  ASSERT_EQ(buffer.size_bytes() % static_cast<int64_t>(sizeof(T)), 0);
  ASSERT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % Allocator::kAlignment, 0u);
  field->Resize(static_cast<int>(buffer.size_bytes() / static_cast<int64_t>(sizeof(T))), T{});
  if (!buffer.empty()) {
    std::memcpy(field->mutable_data(), buffer.data(), static_cast<size_t>(buffer.size_bytes()));
  }
}

void ToProto(const DecodedTensor& decoded, v1::Tensor* tensor) {
  tensor->set_dtype(decoded.dtype);
  for (const int64_t dim : decoded.shape) tensor->add_shape(dim);
  if (decoded.has_quantization) {
    tensor->mutable_quantization()->set_granularity(decoded.granularity);
    tensor->mutable_quantization()->set_block_k(decoded.block_k);
    CopyElements<float>(decoded.scales, tensor->mutable_quantization()->mutable_scales());
  } else {
    EXPECT_TRUE(decoded.scales.empty());
  }
  CopyElements<float>(decoded.values, tensor->mutable_values());
  tensor->mutable_data()->assign(reinterpret_cast<const char*>(decoded.data.data()),
                                 static_cast<size_t>(decoded.data.size_bytes()));
}

int64_t BufferBytes(const DecodedTensor& tensor) {
  return tensor.scales.size_bytes() + tensor.values.size_bytes() + tensor.data.size_bytes();
}

int64_t BufferBytes(const DecodedForwardRequest& request) {
  return request.topk_ids.size_bytes() + request.topk_weights.size_bytes() +
         request.adapter_index.size_bytes() + BufferBytes(request.router_logits) +
         BufferBytes(request.hidden_states);
}

// `options_present`: whether the message had options is not decoded, for it does not matter.
v1::ForwardRequest ToProto(const DecodedForwardRequest& decoded, bool options_present) {
  v1::ForwardRequest request;
  request.set_request_id(decoded.request_id);
  request.set_model(decoded.model);
  request.set_layer(decoded.layer);
  switch (decoded.routing_case) {
    case v1::ForwardRequest::kTopk:
      request.mutable_topk()->set_topk(decoded.topk);
      CopyElements<int32_t>(decoded.topk_ids, request.mutable_topk()->mutable_ids());
      CopyElements<float>(decoded.topk_weights, request.mutable_topk()->mutable_weights());
      break;
    case v1::ForwardRequest::kRouterLogits:
      EXPECT_TRUE(decoded.router_logits.present);
      ToProto(decoded.router_logits, request.mutable_router_logits());
      break;
    case v1::ForwardRequest::kServerGate:
      request.mutable_server_gate();
      break;
    case v1::ForwardRequest::ROUTING_NOT_SET:
      break;
  }
  if (decoded.routing_case != v1::ForwardRequest::kTopk) {
    EXPECT_TRUE(decoded.topk_ids.empty() && decoded.topk_weights.empty());
    EXPECT_EQ(decoded.topk, 0);
  }
  if (decoded.routing_case != v1::ForwardRequest::kRouterLogits) {
    EXPECT_FALSE(decoded.router_logits.present);
    EXPECT_EQ(BufferBytes(decoded.router_logits), 0);
  }
  request.set_apply_router_weight_on_input(decoded.apply_router_weight_on_input);
  if (options_present) *request.mutable_options() = decoded.options;
  for (const std::string& adapter : decoded.adapters) request.add_adapters(adapter);
  CopyElements<int32_t>(decoded.adapter_index, request.mutable_adapter_index());
  request.set_expected_fingerprint(decoded.expected_fingerprint);
  if (decoded.hidden_states.present) {
    ToProto(decoded.hidden_states, request.mutable_hidden_states());
  } else {
    EXPECT_EQ(BufferBytes(decoded.hidden_states), 0);
  }
  return request;
}

// Bytes as protobuf writes them: NaNs compare by their bits.
template <typename Message>
std::string Canonical(Message message) {
  message.DiscardUnknownFields();
  return message.SerializeAsString();
}

struct Outcome {
  bool accepted = false;
  std::string canonical;
};

// What protobuf makes of it, unknown fields dropped.
template <typename Message>
Outcome Reference(const std::string& wire, Message* message) {
  const bool accepted = message->ParseFromString(wire);
  return {accepted, accepted ? Canonical(*message) : ""};
}

void ExpectCopiedOnce(const DecodedForwardRequest& request, const CountingAllocator& allocator) {
  EXPECT_EQ(request.payload_bytes_copied, BufferBytes(request));
  EXPECT_EQ(allocator.num_bytes, BufferBytes(request));
  EXPECT_LE(allocator.num_buffers, 9);
}

}  // namespace

bool CompareForwardRequest(const std::string& wire, grpc::ByteBuffer* buffer) {
  v1::ForwardRequest reference;
  const Outcome expected = Reference(wire, &reference);
  CountingAllocator allocator;
  const auto decoded = DecodeForwardRequest(buffer, NoLimits(), allocator);
  EXPECT_EQ(decoded.ok(), expected.accepted) << decoded.status();
  if (!decoded.ok()) {
    EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(allocator.num_buffers, 0) << "allocated for a malformed message";
    return false;
  }
  EXPECT_EQ(Canonical(ToProto(*decoded, reference.has_options())), expected.canonical);
  ExpectCopiedOnce(*decoded, allocator);
  return true;
}

bool CompareStreamRequest(const std::string& wire, grpc::ByteBuffer* buffer) {
  v1::ForwardStreamRequest reference;
  const Outcome expected = Reference(wire, &reference);
  CountingAllocator allocator;
  const auto decoded = DecodeForwardStreamRequest(buffer, NoLimits(), allocator);
  EXPECT_EQ(decoded.ok(), expected.accepted) << decoded.status();
  if (!decoded.ok()) return false;
  v1::ForwardStreamRequest message;
  message.set_stream_seq(decoded->stream_seq);
  message.set_timeout_micros(decoded->timeout_micros);
  message.set_cancel(decoded->cancel);
  message.set_traceparent(decoded->traceparent);
  if (decoded->cancel) {
    EXPECT_EQ(allocator.num_buffers, 0);
    EXPECT_EQ(decoded->has_request, reference.has_request());
    reference.clear_request();
    EXPECT_EQ(Canonical(message), Canonical(reference));
    return true;
  }
  if (decoded->has_request) {
    *message.mutable_request() = ToProto(decoded->request, reference.request().has_options());
  }
  EXPECT_EQ(Canonical(message), expected.canonical);
  ExpectCopiedOnce(decoded->request, allocator);
  return true;
}

bool CompareExplainRequest(const std::string& wire, grpc::ByteBuffer* buffer) {
  v1::ExplainRequest reference;
  const Outcome expected = Reference(wire, &reference);
  CountingAllocator allocator;
  const auto decoded = DecodeExplainRequest(buffer, NoLimits(), allocator);
  EXPECT_EQ(decoded.ok(), expected.accepted) << decoded.status();
  if (!decoded.ok()) return false;
  v1::ExplainRequest message;
  message.set_max_tokens(decoded->max_tokens);
  if (decoded->has_request) {
    *message.mutable_request() = ToProto(decoded->request, reference.request().has_options());
  }
  EXPECT_EQ(Canonical(message), expected.canonical);
  ExpectCopiedOnce(decoded->request, allocator);
  return true;
}

}  // namespace expertmesh
