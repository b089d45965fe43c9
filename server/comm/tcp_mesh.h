#ifndef EXPERTMESH_SERVER_COMM_TCP_MESH_H_
#define EXPERTMESH_SERVER_COMM_TCP_MESH_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/comm/rendezvous_store.h"
#include "server/comm/tcp_peer_sockets.h"

namespace expertmesh {

struct TcpMeshParams {
  int32_t ep_rank = 0;
  int32_t ep_size = 1;
  uint64_t incarnation = 0;
  uint64_t epoch = 0;
  // A numeric IPv4 or IPv6 address of this machine that the other ranks can reach. Never a host
  // name, never a wildcard: what is not meant for this network must not be able to connect.
  std::string bind_address;
  // Where the others reach it, if that is another one (a pod behind a translated address); numeric.
  // Empty: bind_address. The port is the same on both.
  std::string advertise_address;
  RendezvousStore* store = nullptr;  // used during the call only
  absl::Time deadline = absl::InfiniteFuture();
  // Null, or set by any thread to give up: CANCELLED within some milliseconds (besides what the
  // store takes).
  const std::atomic<bool>* cancelled = nullptr;
};

// Connects this rank with all others of its epoch, [ep_size] (own rank: nothing). Collective;
// blocks until the last rank has come or the deadline has passed.
//
// Every rank listens on one port, only while this call runs. A connection must show within it the
// secret that the listener left in the store, and the listener answers with the other's: anybody
// else, ranks of other epochs included, is refused with a line in the log and does not disturb the
// group.
//
// INVALID_ARGUMENT (addresses, ranks), ALREADY_EXISTS (this rank is there already), UNAVAILABLE
// (a peer cannot be reached, or is gone again), DEADLINE_EXCEEDED (names the ranks that are
// missing), CANCELLED and other errors of the store.
absl::StatusOr<std::vector<TcpPeerSockets>> ConnectTcpMesh(const TcpMeshParams& params);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_TCP_MESH_H_
