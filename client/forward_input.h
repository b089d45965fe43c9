#ifndef EXPERTMESH_CLIENT_FORWARD_INPUT_H_
#define EXPERTMESH_CLIENT_FORWARD_INPUT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/types/span.h"
#include "expertmesh/v1/expert_service.pb.h"

namespace expertmesh {

// Bytes of a dense row-major little-endian tensor in the caller's memory.
//
// With an `owner`, nothing is copied: gRPC's transport reads `data` directly, possibly for a while
// after the call has ended (a cancelled call's bytes may still wait in a socket), and drops its
// reference when it is done. Without one the bytes are copied once when the call starts, and the
// memory is the caller's again when the start function returns.
struct TensorBytes {
  const void* data = nullptr;
  int64_t size_bytes = 0;
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  std::shared_ptr<const void> owner;
};

// Experts and weights chosen by the caller; read when the call starts, not kept.
struct TopKRouting {
  int32_t topk = 0;
  absl::Span<const int32_t> ids;    // [num_tokens, topk], -1 for none
  absl::Span<const float> weights;  // [num_tokens, topk]
};
struct RouterLogitsRouting {
  TensorBytes logits;  // [num_tokens, num_experts]
  int64_t num_experts = 0;
};
struct ServerGateRouting {};

// One batch of tokens for one MoE layer; see ForwardRequest in expert_service.proto for the meaning
// and limits of each field.
struct ForwardInput {
  std::string request_id;  // empty: the server makes one
  std::string model;       // empty: the only model served
  int32_t layer = 0;
  int64_t num_tokens = 0;
  int64_t hidden_size = 0;
  TensorBytes hidden_states;  // [num_tokens, hidden_size]; float32, float16 or bfloat16
  std::variant<TopKRouting, RouterLogitsRouting, ServerGateRouting> routing;
  bool apply_router_weight_on_input = false;
  v1::ForwardOptions options;
  std::string expected_fingerprint;
};

// An answer: everything but the elements in `response` (its output.data is empty), the elements in
// `output`.
struct ForwardOutput {
  v1::ForwardResponse response;
  int64_t num_tokens = 0;
  int64_t hidden_size = 0;
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  std::vector<std::byte> output;  // [num_tokens, hidden_size]
};

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_FORWARD_INPUT_H_
