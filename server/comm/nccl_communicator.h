#ifndef EXPERTMESH_SERVER_COMM_NCCL_COMMUNICATOR_H_
#define EXPERTMESH_SERVER_COMM_NCCL_COMMUNICATOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/buffer.h"
#include "server/comm/communicator.h"
#include "server/comm/nccl_functions.h"
#include "server/comm/rendezvous_store.h"

namespace expertmesh {

struct NcclCommunicatorParams {
  int32_t ep_rank = 0;
  int32_t ep_size = 1;
  uint64_t incarnation = 0;
  uint64_t epoch = 0;
  int32_t device_index = 0;
  std::shared_ptr<NcclFunctions> functions;
  // A communicator of host memory among the same ranks, whose operations have no places
  // (NewTcpCommunicator): the ranks agree over it before NCCL moves a byte.
  std::unique_ptr<Communicator> control;
  RendezvousStore* store = nullptr;  // used during the call only
  // Of device memory, used during the call only. Null: peers connect at their first operation.
  Allocator* allocator = nullptr;
  absl::Time deadline = absl::InfiniteFuture();  // for the communicator to stand
  const std::atomic<bool>* cancelled = nullptr;  // as TcpMeshParams
  // For NCCL to take one operation, for that to end, from when it is the first of those that NCCL
  // has been given, and for one call of NCCL or the device. Then the communicator is broken with
  // DEADLINE_EXCEEDED. At least a millisecond is taken.
  absl::Duration operation_timeout = absl::Seconds(30);
  // Once it is broken, a call that is being made has half of this to return, since it began; then
  // NCCL's abort has all of it, with what the device then still does; then the call has as much
  // again.
  absl::Duration abort_timeout = absl::Seconds(20);
  // Called, on a thread of the communicator's own, when they have not returned by then: the device
  // may write into any buffer of the epoch for ever, so the process must end (std::_Exit:
  // destructors would wait for the device). Must be set.
  std::function<void(const absl::Status&)> on_stuck_abort;
};

// One rank's communicator of an epoch over NCCL, for device memory. Collective; blocks until all
// ranks have come. Errors of the store, of `control` and DEADLINE_EXCEEDED, CANCELLED; UNAVAILABLE
// what NCCL says of peers and the network, INTERNAL what it says of itself and the device.
//
// NCCL connects two ranks when one first sends to the other, and the ranks of a collective when
// they first call it (by what a size of it needs, if NCCL_RUNTIME_CONNECT is not 0), which takes up
// to a second. So a few bytes go each way that rows take before the communicator stands: no client
// waits for it, and ranks that cannot reach each other do not form an epoch. Nothing else of it
// stays, but that bytes_sent and wait_nanos count it.
//
// NCCL checks nothing that it is told: counts that differ hang it, and so does a peer that has
// gone. So each operation is agreed on first, over `control`: kind, tag (which `control` compares)
// and every count of every rank. A rank tells the others when its operation is called and its turn
// comes, which is before its stream gets there, so the round trip passes while the device computes
// what is to be sent; Barrier alone waits for the stream. Only then are the sends and receives
// given to NCCL, in one group, without those of zero bytes. What does not agree fails on every rank
// with DATA_LOSS, and what breaks `control` (an abort anywhere, a lost peer) breaks this, with
// `control`'s status. Not checked: that a payload arrived as it was sent. NVLink and InfiniBand
// check their packets; there is no checksum from end to end.
//
// Blocks of one size from all to all go by ncclAlltoAll, where the library has it, and
// ncclAllGather; the ranks know that of one another, so all take the same way.
//
// One thread makes all calls of NCCL, by place, on a stream of the communicator's own: events tie
// it to the callers' streams, which wait for it on the device, so that what follows an operation is
// launched as soon as NCCL has the operation. The same thread polls for NCCL's asynchronous errors
// and for what the device has done. Only when it has seen the operation end well do callers'
// streams tell of what stands behind (CudaStream): nothing that ran on an aborted operation's bytes
// is ever reported as done. Another thread watches the clock: calls of NCCL and of the device may
// not return.
//
// After any failure ncclCommAbort runs on a thread of its own. Pending operations fail, and Abort
// returns, when that is through, not before: until then the device may touch their buffers. See
// on_stuck_abort for when it is never through.
absl::StatusOr<std::unique_ptr<Communicator>> NewNcclCommunicator(NcclCommunicatorParams params);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_NCCL_COMMUNICATOR_H_
