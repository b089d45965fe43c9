#ifndef EXPERTMESH_SERVER_COMM_TCP_HELLO_H_
#define EXPERTMESH_SERVER_COMM_TCP_HELLO_H_

#include <array>
#include <cstdint>

#include "server/comm/tcp_peer_sockets.h"

namespace expertmesh {

// Each rank leaves one of its own in the epoch's store: who shows it has read the store.
using TcpSecret = std::array<char, 16>;

// The first bytes of a connection, from the rank that connects.
struct TcpHello {
  static constexpr uint64_t kMagic = 0x31686d7470784545;
  uint64_t magic = kMagic;
  uint64_t incarnation = 0;
  uint64_t epoch = 0;
  int32_t from_rank = 0;
  int32_t to_rank = 0;
  TcpChannel channel = TcpChannel::kData;
  uint32_t ep_size = 0;
  TcpSecret secret = {};  // the listener's
};
static_assert(sizeof(TcpHello) == 56);

// The answer: the secret of the rank that connects.
struct TcpHelloReply {
  uint64_t magic = TcpHello::kMagic;
  TcpSecret secret = {};
};
static_assert(sizeof(TcpHelloReply) == 24);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_TCP_HELLO_H_
