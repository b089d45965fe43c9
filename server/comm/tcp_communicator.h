#ifndef EXPERTMESH_SERVER_COMM_TCP_COMMUNICATOR_H_
#define EXPERTMESH_SERVER_COMM_TCP_COMMUNICATOR_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/comm/communicator.h"
#include "server/comm/tcp_mesh.h"

namespace expertmesh {

struct TcpCommunicatorParams {
  TcpMeshParams mesh;
  // For one whole operation, from the moment at which the stream reaches it and the operations
  // before it are done. Then the communicator is broken with DEADLINE_EXCEEDED on every rank.
  absl::Duration operation_timeout = absl::Seconds(30);
};

// One rank's communicator of an epoch whose ranks are processes (or threads) connected by TCP.
// Collective; blocks until all ranks have come; errors as ConnectTcpMesh. Host memory only.
//
// Bytes go from the sender's buffer to the receiver's without a copy between, in one message per
// pair of ranks that carries 64 bytes of its own: what it is (checked before the operation can end)
// and a checksum. Received bytes may lie in the buffer of an operation that then fails. The caller
// of an operation moves what can be moved at once; the rest is moved by the communicator's one
// thread, which sleeps while there is nothing to do.
//
// A lost rank is noticed at once, operation or not; a stopped one by the operation's deadline. A
// rank that gives up tells the others why, so all fail with the same status; but an operation that
// has ended on a rank has ended, and such a rank learns it at the next one. A wrong count is known
// to every rank before the operation ends. No signal is raised (SIGPIPE) and nothing terminates the
// process.
//
// Why not Gloo, the usual library for this on CPUs. Debian's libgloo (2022) cannot be made safe
// from outside: while a pair listens, the first to connect becomes the peer, whoever it is, and the
// true one is refused; 48 bytes from it, or a peer's message longer than the posted receive, throw
// an exception on Gloo's own thread, which terminates the process; the classes that would have to
// be overridden need a header that the package leaves out (gloo/common/memory.h), and
// Ubuntu 24.04's are others. Its unbound buffers want every payload copied into memory of their
// own, and an exchange takes longer (tests/bench/bench_exchange measures both).
absl::StatusOr<std::unique_ptr<Communicator>> NewTcpCommunicator(
    const TcpCommunicatorParams& params);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_TCP_COMMUNICATOR_H_
