#include "server/comm/tcp_exchange.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

TEST(TcpExchangeTest, WithoutDescriptorsItIsBrokenAndThePeerHearsOfIt) {
  std::vector<TcpPeerSockets> sockets(2);
  int data[2];
  int control[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, data), 0);
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, control), 0);
  sockets[1].data.reset(data[0]);
  sockets[1].control.reset(control[0]);
  UniqueFd peer_data;
  UniqueFd peer_control;
  peer_data.reset(data[1]);
  peer_control.reset(control[1]);

  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  rlimit none = limit;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  TcpExchange exchange(0, std::move(sockets), absl::Seconds(30));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);

  EXPECT_EQ(exchange.broken(), absl::ResourceExhaustedError("epoll_create1: Too many open files"));
  pollfd said = {peer_control.get(), POLLIN, 0};
  EXPECT_EQ(poll(&said, 1, 20000), 1);
}

}  // namespace
}  // namespace expertmesh
