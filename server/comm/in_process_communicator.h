#ifndef EXPERTMESH_SERVER_COMM_IN_PROCESS_COMMUNICATOR_H_
#define EXPERTMESH_SERVER_COMM_IN_PROCESS_COMMUNICATOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "server/comm/communicator.h"

namespace expertmesh {

// The communicators of one epoch whose ranks all live in this process, [ep_size]; ep_size >= 1.
//
// No thread waits for another: a rank that arrives at an operation exchanges blocks, both ways,
// with the ranks that stand there already, so the last one leaves nothing to do. Therefore one
// thread can drive all ranks in turn over inline streams, as long as every rank has posted an
// operation before a Wait needs its result, and ranks with a thread each copy side by side.
//
// Host memory, unless `copy_bytes` is set: it copies what a rank's memory is, on the thread of a
// stream's host work, and blocks until that is done. Destroying one communicator is the loss of
// that rank: the others fail with UNAVAILABLE. A stream that has failed before it gets to an
// operation breaks the group as Abort does: whoever drives all ranks may wait for a peer's stream
// first.
std::vector<std::unique_ptr<Communicator>> NewInProcessCommunicators(
    int32_t ep_size,
    std::function<absl::Status(std::byte* to, const std::byte* from, int64_t size_bytes)>
        copy_bytes = nullptr);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_IN_PROCESS_COMMUNICATOR_H_
