#ifndef EXPERTMESH_SERVER_RPC_FORWARD_STREAM_ENVELOPE_H_
#define EXPERTMESH_SERVER_RPC_FORWARD_STREAM_ENVELOPE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"

namespace expertmesh {

// What tells whose message it is, so that an error in the rest of it can be answered to it alone.
struct ForwardStreamEnvelope {
  uint64_t stream_seq = 0;
  int64_t timeout_micros = 0;
  bool cancel = false;
};

// Reads the outermost fields of a ForwardStreamRequest and skips its `request`. INVALID_ARGUMENT
// (MALFORMED_MESSAGE) where these are malformed: then nobody can be told which message it was.
// `message` is not changed. Thread safe, does not block.
absl::StatusOr<ForwardStreamEnvelope> ReadForwardStreamEnvelope(grpc::ByteBuffer* message);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_FORWARD_STREAM_ENVELOPE_H_
