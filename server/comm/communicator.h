#ifndef EXPERTMESH_SERVER_COMM_COMMUNICATOR_H_
#define EXPERTMESH_SERVER_COMM_COMMUNICATOR_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/base/stream.h"

namespace expertmesh {

// Which operation of which step this is. All ranks must pass the same; a
// mismatch fails the operation on every rank.
struct CollectiveTag {
  uint64_t incarnation = 0;
  uint64_t epoch = 0;
  uint64_t step = 0;
  uint32_t operation = 0;  // counts the collectives within a step
  // Place in the epoch's total order (see Communicator); operations of one place run in the order
  // in which one thread calls them. kAsCalled: the order of the calls is the total order.
  int64_t order = kAsCalled;
  static constexpr int64_t kAsCalled = -1;
  // The order aside: ranks that disagree on it meet at different operations, which differ in the
  // rest.
  friend bool operator==(const CollectiveTag &a, const CollectiveTag &b) {
    return a.incarnation == b.incarnation && a.epoch == b.epoch && a.step == b.step &&
           a.operation == b.operation;
  }
};

struct AllToAllVParams {
  CollectiveTag tag;
  const std::byte *send = nullptr;          // blocks for rank 0, 1, …, ep_size - 1, without gaps
  absl::Span<const int64_t> send_bytes;     // host, [ep_size]
  std::byte *receive = nullptr;             // blocks from rank 0, 1, …, ep_size - 1, without gaps
  absl::Span<const int64_t> receive_bytes;  // host, [ep_size]; must be what the peers send
};

struct AllGatherVParams {
  CollectiveTag tag;
  const std::byte *send = nullptr;          // receive_bytes[ep_rank] bytes
  std::byte *receive = nullptr;             // blocks from rank 0, 1, …, ep_size - 1, without gaps
  absl::Span<const int64_t> receive_bytes;  // host, [ep_size]
};

// Moves bytes among the ranks of one epoch; knows nothing of experts. One
// object per rank and epoch.
//
// AllToAllV, AllGatherV and Barrier are collective: every rank calls them, in
// the same order, with the same tag. They are enqueued on `stream` and return
// at once; work that follows on the stream sees the received bytes. Memory that
// params name must live until the stream has passed the operation or Abort has
// returned. One thread at a time, unless operations have places:
//
// Steps that overlap give their operations places, 0, 1, 2 and so on without gaps, that the control
// plane chose; then any number of threads may call, whichever comes first, and the communicator
// runs the operations one after the other by place. A place may hold several operations or none:
// each rank closes it (CloseOrder) when it has called them all. Either all operations of an epoch
// have places or none has.
//
// After any failure the communicator is broken: pending and later operations
// fail with the first error on every rank (UNAVAILABLE a peer is lost,
// DATA_LOSS counts, tags or checksums do not match, ABORTED after Abort or
// Break), and only Abort and destruction are left. Zero bytes to or from a rank are fine.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int32_t ep_rank() const = 0;
  virtual int32_t ep_size() const = 0;

  virtual absl::Status AllToAllV(const AllToAllVParams &params, Stream &stream) = 0;
  virtual absl::Status AllGatherV(const AllGatherVParams &params, Stream &stream) = 0;
  virtual absl::Status Barrier(const CollectiveTag &tag, Stream &stream) = 0;

  // This rank calls no further operation with this place: once those that it called are done, the
  // next place's turn comes. Once for each place, in any order; any thread. Does not block.
  virtual void CloseOrder(int64_t order) = 0;

  // Local, any thread, idempotent: ends pending operations on every rank with
  // ABORTED and `reason`. When it has returned, the communicator touches no
  // buffer any more.
  virtual void Abort(const absl::Status &reason) = 0;

  // As Abort, without waiting for what still touches buffers: pending operations end a little
  // later, and an Abort that follows waits for that. Does not block: for threads that must not.
  virtual void Break(const absl::Status &reason) { Abort(reason); }

  // The error that broke the communicator; OK while it is whole. Any thread; does not block.
  virtual absl::Status status() const = 0;

  // For metrics and tests; any thread; since construction, [ep_size], own rank 0.
  // Payload bytes sent to each rank.
  virtual std::vector<int64_t> bytes_sent() const = 0;
  // Time from reaching an operation (AllToAllV, AllGatherV, Barrier) until all that the rank sends
  // in it had come, nanoseconds. Zeros where nobody measures.
  virtual std::vector<int64_t> wait_nanos() const { return std::vector<int64_t>(ep_size()); }
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_COMMUNICATOR_H_
