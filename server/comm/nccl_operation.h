#ifndef EXPERTMESH_SERVER_COMM_NCCL_OPERATION_H_
#define EXPERTMESH_SERVER_COMM_NCCL_OPERATION_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "server/comm/collective_call.h"
#include "server/comm/nccl_event_pool.h"

namespace expertmesh {

// One rank's part of a collective operation over NCCL.
//
// Its `done` is placed when NCCL has the operation and the caller's stream is one of the device;
// signalled when the operation has ended.
struct NcclOperation : CollectiveCall {
  explicit NcclOperation(CollectiveCall call) : CollectiveCall(std::move(call)) {}

  // The caller's stream has reached the operation; or, with `reached`, that event is recorded on
  // it, which is a stream of the device.
  Event ready;
  NcclEventPool::Shared reached;

  // What the ranks tell each other before bytes move: [ep_size] records of HeaderSize numbers.
  std::vector<int64_t> header;
  std::vector<int64_t> headers;
  std::vector<int64_t> header_bytes;  // [ep_size]
  Event agreed;                       // headers are there
  bool checked = false;               // and say the same
  NcclEventPool::Shared completed;    // on the communicator's stream; null: nothing moves

  // `ep_size` numbers of what is sent, as many of what is expected, and the kind.
  int64_t HeaderSize() const { return 2 * int64_t{ep_size} + 1; }
  void WriteHeader();
  // DATA_LOSS, the same on every rank, when ranks disagree on the kind or on a count.
  absl::Status CheckHeaders() const;
  // After CheckHeaders: the count that all ranks send to all, or -1.
  int64_t EqualBytes() const;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_NCCL_OPERATION_H_
