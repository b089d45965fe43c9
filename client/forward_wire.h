#ifndef EXPERTMESH_CLIENT_FORWARD_WIRE_H_
#define EXPERTMESH_CLIENT_FORWARD_WIRE_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>

#include "absl/status/statusor.h"
#include "client/forward_input.h"

namespace expertmesh {

// The bytes of a ForwardRequest message, made without passing the tensors through a protobuf
// message: the payload stands last, in a slice of its own that points at the caller's memory (or at
// the one copy of it). INVALID_ARGUMENT when a size does not fit the shape it is declared with.
absl::StatusOr<grpc::ByteBuffer> EncodeForwardRequest(const ForwardInput& input);

// Reads a ForwardResponse message; output.data is copied once, from gRPC's slices to
// ForwardOutput::output. DATA_LOSS when the bytes are no such message, or when the output does not
// have the size that its shape says.
absl::StatusOr<ForwardOutput> DecodeForwardResponse(const grpc::ByteBuffer& bytes);

// The same within a ForwardStreamRequest. timeout_micros 0: the stream's own deadline.
absl::StatusOr<grpc::ByteBuffer> EncodeForwardStreamRequest(uint64_t stream_seq,
                                                            int64_t timeout_micros,
                                                            const ForwardInput& input);
// The message that cancels another one.
grpc::ByteBuffer EncodeForwardStreamCancel(uint64_t stream_seq);

// A ForwardStreamResponse: whose answer, and the answer or the server's error with its details (see
// client_error.h). DATA_LOSS as above when it is not even known whose; otherwise in `result`.
struct ForwardStreamAnswer {
  uint64_t stream_seq = 0;
  absl::StatusOr<ForwardOutput> result;
};
absl::StatusOr<ForwardStreamAnswer> DecodeForwardStreamResponse(const grpc::ByteBuffer& bytes);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_FORWARD_WIRE_H_
