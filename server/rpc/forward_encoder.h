#ifndef EXPERTMESH_SERVER_RPC_FORWARD_ENCODER_H_
#define EXPERTMESH_SERVER_RPC_FORWARD_ENCODER_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "expertmesh/v1/expert_service.pb.h"
#include "expertmesh/v1/tensor.pb.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/control/forward_call.h"

// Answers of the data path: one small slice of protobuf, then the output's bytes where they lie, as
// slices that keep their owners until gRPC has sent them (and the ByteBuffer is cleared). What
// arrives is the same message that protobuf would have serialized, fields in another order.

namespace expertmesh {

// The output tensor of an answer.
struct EncodedOutput {
  // dtype and shape; `values` and `data` empty.
  v1::Tensor tensor;
  // The elements, in order: raw bytes of dtype for Tensor.data, or little-endian float32 for
  // Tensor.values. Empty spans are allowed; the owners are copied, the bytes are not.
  absl::Span<const OutputSpan> spans;
  enum class Field { kData, kValues } field = Field::kData;
};

// `header` has everything but `output`, which comes from `output` (null: the answer has none).
// RESOURCE_EXHAUSTED (MESSAGE_TOO_LARGE) above protobuf's limit of 2^31 - 1 bytes. Thread-safe,
// does not block. The owners' last references may be dropped on any of gRPC's threads.
absl::StatusOr<grpc::ByteBuffer> EncodeForwardResponse(const v1::ForwardResponse& header,
                                                       const EncodedOutput* output);

// The same as ForwardStreamResponse.response.
absl::StatusOr<grpc::ByteBuffer> EncodeForwardStreamResponse(uint64_t stream_seq,
                                                             const v1::ForwardResponse& header,
                                                             const EncodedOutput* output);

// A message without payload, for services that speak ByteBuffers throughout.
grpc::ByteBuffer EncodeSmallMessage(const google::protobuf::MessageLite& message);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_FORWARD_ENCODER_H_
