#ifndef EXPERTMESH_SERVER_COMM_TCP_PEER_SOCKETS_H_
#define EXPERTMESH_SERVER_COMM_TCP_PEER_SOCKETS_H_

#include <cstdint>

#include "server/comm/unique_fd.h"

namespace expertmesh {

// What one of the two connections between two ranks is for; its number goes over the wire.
enum class TcpChannel : uint32_t {
  kData = 0,     // payloads
  kControl = 1,  // why a rank gave up; always has room, however full the other one is
};
constexpr uint32_t kNumTcpChannels = 2;

// Two connected, non-blocking sockets between this rank and a peer.
struct TcpPeerSockets {
  UniqueFd data;
  UniqueFd control;

  bool are_there() const { return data.valid() && control.valid(); }
  bool has(TcpChannel channel) const;
  // Takes over a connected socket, and sets its buffers and keepalive.
  void Adopt(UniqueFd connected, TcpChannel channel);
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_TCP_PEER_SOCKETS_H_
