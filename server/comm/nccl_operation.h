#ifndef EXPERTMESH_SERVER_COMM_NCCL_OPERATION_H_
#define EXPERTMESH_SERVER_COMM_NCCL_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/base/stream.h"
#include "server/comm/communicator.h"
#include "server/comm/nccl_event_pool.h"

namespace expertmesh {

// One rank's part of a collective operation over NCCL.
struct NcclOperation {
  enum class Kind : int64_t { kAllToAllV, kAllGatherV, kBarrier };

  Kind kind = Kind::kBarrier;
  CollectiveTag tag;
  const std::byte* send = nullptr;
  std::byte* receive = nullptr;
  std::vector<int64_t> send_bytes;     // [ep_size], to each rank
  std::vector<int64_t> receive_bytes;  // [ep_size], from each rank

  // The caller's stream has reached the operation; or, with `reached`, that event is recorded on
  // it, which is a stream of the device.
  Event ready;
  NcclEventPool::SharedEvent reached;
  // Placed when NCCL has the operation and the caller's stream is one of the device; signalled when
  // the operation has ended and the buffers are no longer needed.
  Event done;

  // What the ranks tell each other before bytes move: [ep_size] records of HeaderSize numbers.
  std::vector<int64_t> header;
  std::vector<int64_t> headers;
  std::vector<int64_t> header_bytes;     // [ep_size]
  Event agreed;                          // headers are there
  bool checked = false;                  // and say the same
  NcclEventPool::SharedEvent completed;  // on the communicator's stream; null: nothing moves

  // `ep_size` numbers of what is sent, as many of what is expected, and the kind.
  static int64_t HeaderSize(int64_t ep_size) { return 2 * ep_size + 1; }
  void WriteHeader(int64_t ep_size);
  // DATA_LOSS, the same on every rank, when ranks disagree on the kind or on a count.
  absl::Status CheckHeaders(int64_t ep_size) const;
  // After CheckHeaders: the count that all ranks send to all, or -1.
  int64_t EqualBytes(int64_t ep_size) const;

  std::string ToString() const;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_NCCL_OPERATION_H_
