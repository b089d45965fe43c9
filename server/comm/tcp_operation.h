#ifndef EXPERTMESH_SERVER_COMM_TCP_OPERATION_H_
#define EXPERTMESH_SERVER_COMM_TCP_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "server/comm/communicator.h"
#include "server/comm/tcp_link.h"

namespace expertmesh {

// One rank's part of a collective operation over TCP.
struct TcpOperation {
  enum class Kind : uint8_t { kAllToAllV, kAllGatherV, kBarrier };

  Kind kind = Kind::kBarrier;
  int32_t ep_rank = 0;
  int32_t ep_size = 1;
  CollectiveTag tag;
  const std::byte* send = nullptr;
  std::byte* receive = nullptr;
  std::vector<int64_t> send_bytes;     // [ep_size]; kAllGatherV: empty
  std::vector<int64_t> receive_bytes;  // [ep_size]; kBarrier: empty, as send_bytes
  Event done;                          // signalled when the buffers are no longer needed

  int64_t SendBytes(int32_t rank) const;
  int64_t ReceiveBytes(int32_t rank) const;

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

  std::string ToString() const;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_TCP_OPERATION_H_
