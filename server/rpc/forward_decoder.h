#ifndef EXPERTMESH_SERVER_RPC_FORWARD_DECODER_H_
#define EXPERTMESH_SERVER_RPC_FORWARD_DECODER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "expertmesh/v1/expert_service.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "kernels/base/buffer.h"

// Requests of the data path, read from gRPC's slices without protobuf message objects: each payload
// (hidden states, logits, ids, weights, scales, adapter indices) is copied once, straight into a
// buffer of its own. What is accepted, and what it means, is exactly what protobuf's parser accepts
// and means: any field order, split and unpacked repeated fields, merged repeats of a message,
// last-wins scalars and oneofs, unknown fields and groups. Shapes, types and ids are not judged
// here.

namespace expertmesh {

// Bounds on what small fields may hold, so that a hostile message costs no more memory than its own
// size. Exceeding one is INVALID_ARGUMENT (INVALID_FIELD).
struct ForwardDecodeLimits {
  // Of the whole message; exceeded: RESOURCE_EXHAUSTED (MESSAGE_TOO_LARGE).
  int64_t max_message_bytes = (int64_t{1} << 31) - 1;
  int64_t max_request_id_bytes = 128;
  int64_t max_name_bytes = 1024;  // model, an adapter's name, fingerprint, traceparent
  int64_t max_adapters = 1024;
  int64_t max_shape_dims = 8;
};

// A Tensor field. At most one of `values` and `data` is meant to be set; both are given as sent.
struct DecodedTensor {
  bool present = false;
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;  // any number that was sent
  absl::InlinedVector<int64_t, 4> shape;           // any numbers that were sent
  bool has_quantization = false;
  v1::Granularity granularity = v1::GRANULARITY_UNSPECIFIED;
  int32_t block_k = 0;
  Buffer scales;  // float32
  Buffer values;  // float32
  Buffer data;    // raw
};

struct DecodedForwardRequest {
  std::string request_id;
  std::string model;
  int32_t layer = 0;
  v1::ForwardRequest::RoutingCase routing_case = v1::ForwardRequest::ROUTING_NOT_SET;
  // kTopk
  int32_t topk = 0;
  Buffer topk_ids;      // int32
  Buffer topk_weights;  // float32
  // kRouterLogits
  DecodedTensor router_logits;
  bool apply_router_weight_on_input = false;
  v1::ForwardOptions options;
  std::vector<std::string> adapters;
  Buffer adapter_index;  // int32
  std::string expected_fingerprint;
  DecodedTensor hidden_states;

  // Bytes copied into the buffers above, counted as they are copied: the sum of the buffers' sizes,
  // since nothing is copied twice.
  int64_t payload_bytes_copied = 0;
};

struct DecodedForwardStreamRequest {
  uint64_t stream_seq = 0;
  int64_t timeout_micros = 0;
  bool cancel = false;  // then the payload buffers of `request` are left empty
  std::string traceparent;
  bool has_request = false;
  DecodedForwardRequest request;
};

struct DecodedExplainRequest {
  bool has_request = false;
  DecodedForwardRequest request;
  int32_t max_tokens = 0;
};

// Gives a buffer of that many bytes (> 0) in host memory, or the error that the call will end with.
using PayloadAllocator = absl::FunctionRef<absl::StatusOr<Buffer>(int64_t size_bytes)>;

// The whole message is checked before anything is allocated. `message` is read twice, not changed,
// and not referred to afterwards. Errors: INVALID_ARGUMENT (MALFORMED_MESSAGE with the offset;
// INVALID_FIELD for a limit), RESOURCE_EXHAUSTED (MESSAGE_TOO_LARGE), and `allocate`'s own.
// Thread-safe, does not block.
absl::StatusOr<DecodedForwardRequest> DecodeForwardRequest(grpc::ByteBuffer* message,
                                                           const ForwardDecodeLimits& limits,
                                                           PayloadAllocator allocate);
absl::StatusOr<DecodedForwardStreamRequest> DecodeForwardStreamRequest(
    grpc::ByteBuffer* message, const ForwardDecodeLimits& limits, PayloadAllocator allocate);
absl::StatusOr<DecodedExplainRequest> DecodeExplainRequest(grpc::ByteBuffer* message,
                                                           const ForwardDecodeLimits& limits,
                                                           PayloadAllocator allocate);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_FORWARD_DECODER_H_
