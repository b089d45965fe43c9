#ifndef EXPERTMESH_SERVER_RPC_PAYLOAD_MESSAGE_H_
#define EXPERTMESH_SERVER_RPC_PAYLOAD_MESSAGE_H_

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "grpcpp/support/byte_buffer.h"
#include "kernels/base/buffer.h"
#include "server/control/forward_call.h"

// Protobuf messages of the rank link whose one large `bytes` field lies in a message in a message:
// the large field goes by gRPC's slices, everything else by protobuf.

namespace expertmesh {

// Field numbers on the way to the payload, outermost first.
using PayloadPath = std::array<uint32_t, 3>;

// The messages on the way, serialized without the next one: outermost first.
using PayloadHeads = std::array<std::string, 3>;

// RESOURCE_EXHAUSTED (MESSAGE_TOO_LARGE) above protobuf's 2 GiB.
absl::Status CheckPayloadMessageSize(int64_t size_bytes);

// The payload's bytes stay where they are, held by the spans' owners until gRPC has sent them;
// those of a span without an owner are copied. RESOURCE_EXHAUSTED (MESSAGE_TOO_LARGE) above
// protobuf's 2 GiB.
absl::StatusOr<grpc::ByteBuffer> EncodePayloadMessage(const PayloadPath& path,
                                                      const PayloadHeads& heads,
                                                      absl::Span<const OutputSpan> payload);

struct PayloadMessage {
  // How many of the path's fields were there; heads behind that are empty.
  int depth = 0;
  PayloadHeads heads;
  int64_t payload_bytes = 0;
  // The allocator's error, when there is no memory for the payload: then it is empty, and whoever
  // waits for what the heads name can be told.
  absl::Status payload_status;
  Buffer payload;
};

// Takes a message apart; merged repeats of the messages on the way, and a last payload that wins,
// as protobuf has it. The payload is copied once. `message` is read twice and not changed.
// INVALID_ARGUMENT (MALFORMED_MESSAGE). Does not look into the heads.
absl::StatusOr<PayloadMessage> DecodePayloadMessage(grpc::ByteBuffer* message,
                                                    const PayloadPath& path, Allocator* allocator);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_PAYLOAD_MESSAGE_H_
