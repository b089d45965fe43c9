#ifndef EXPERTMESH_SERVER_COMM_IN_PROCESS_COMMUNICATOR_H_
#define EXPERTMESH_SERVER_COMM_IN_PROCESS_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "server/comm/communicator.h"

namespace expertmesh {

// The communicators of one epoch whose ranks all live in this process, [ep_size]; ep_size >= 1.
//
// No thread waits for another: a rank that arrives at an operation exchanges blocks, both ways,
// with the ranks that stand there already, so the last one leaves nothing to do. Therefore one
// thread can drive all ranks in turn over inline streams, as long as every rank has posted an
// operation before a Wait needs its result, and ranks with a thread each copy side by side.
//
// Host memory only. Destroying one communicator is the loss of that rank: the others fail with
// UNAVAILABLE.
std::vector<std::unique_ptr<Communicator>> NewInProcessCommunicators(int32_t ep_size);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_IN_PROCESS_COMMUNICATOR_H_
