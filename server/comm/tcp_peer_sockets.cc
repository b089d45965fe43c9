#include "server/comm/tcp_peer_sockets.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <utility>

namespace expertmesh {
namespace {

constexpr int kSendBufferBytes = 4 << 20;
constexpr int kKeepaliveIdleSeconds = 30;
constexpr int kKeepaliveIntervalSeconds = 5;
constexpr int kKeepaliveProbes = 3;

}  // namespace

bool TcpPeerSockets::has(TcpChannel channel) const {
  return (channel == TcpChannel::kData ? data : control).valid();
}

void TcpPeerSockets::Adopt(UniqueFd connected, TcpChannel channel) {
  const int fd = connected.get();
  const auto set = [fd](int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  // A firewall between ranks may forget a connection on which nothing moves; and if it has, that
  // should be known before the next step needs it.
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleSeconds);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveIntervalSeconds);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes);
  // As large as the system lets it be: the fewer wake-ups a payload takes, the better.
  if (channel == TcpChannel::kData) set(SOL_SOCKET, SO_SNDBUF, kSendBufferBytes);
  (channel == TcpChannel::kData ? data : control) = std::move(connected);
}

}  // namespace expertmesh
