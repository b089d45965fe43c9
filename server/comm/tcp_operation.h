#ifndef EXPERTMESH_SERVER_COMM_TCP_OPERATION_H_
#define EXPERTMESH_SERVER_COMM_TCP_OPERATION_H_

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "server/comm/collective_call.h"
#include "server/comm/tcp_link.h"

namespace expertmesh {

// One rank's part of a collective operation over TCP.
struct TcpOperation : CollectiveCall {
  explicit TcpOperation(CollectiveCall call) : CollectiveCall(std::move(call)) {}

  // Copies what this rank sends to itself. DATA_LOSS when that is not what it expects.
  absl::Status CopyOwnBlock() const;
  // For the message to `rank`.
  TcpMessageHeader Header(int32_t rank) const;
  // A number that the ranks' counts give. Those of all ranks add up to 0 if, and but for one chance
  // in 2^64 only if, every rank expects what the others send; so each can tell from the headers of
  // all, even when it is not itself who disagrees.
  uint64_t Imbalance() const;
  // DATA_LOSS when `rank` is at another operation, or its message has another size than is
  // expected.
  absl::Status CheckHeader(const TcpMessageHeader& header, int32_t rank) const;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_TCP_OPERATION_H_
