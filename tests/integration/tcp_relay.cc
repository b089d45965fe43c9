#include "tests/integration/tcp_relay.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

namespace expertmesh {
namespace {

constexpr int64_t kChunkBytes = 256 << 10;

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// One way: what was read and could not be written yet, and how much may still be read.
struct Direction {
  int from = -1;
  int to = -1;
  int64_t bytes_left = 0;
  std::string pending;

  bool wants_to_read() const { return pending.empty() && bytes_left > 0; }

  // False at the end of either side.
  bool Move() {
    if (wants_to_read()) {
      pending.resize(static_cast<size_t>(std::min(kChunkBytes, bytes_left)));
      const ssize_t got = recv(from, pending.data(), pending.size(), MSG_DONTWAIT);
      pending.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
      if (got == 0 || (got < 0 && errno != EAGAIN)) return false;
      bytes_left -= std::max<ssize_t>(got, 0);
    }
    if (pending.empty()) return true;
    const ssize_t put = send(to, pending.data(), pending.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0) return errno == EAGAIN;
    pending.erase(0, static_cast<size_t>(put));
    return true;
  }
};

}  // namespace

struct TcpRelay::Connection {
  Direction up;
  Direction down;
  bool counted_as_stalled = false;

  void Close(bool reset) {
    for (const int fd : {up.from, up.to}) {
      const linger abort{.l_onoff = 1, .l_linger = 0};
      if (reset) setsockopt(fd, SOL_SOCKET, SO_LINGER, &abort, sizeof(abort));
      close(fd);
    }
  }
};

TcpRelay::TcpRelay(int server_port, const Limits& limits)
    : server_port_(server_port), limits_(limits) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(listen(listener_, 256), 0);
  EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size), 0);
  port_ = ntohs(address.sin_port);
  int wake[2];
  EXPECT_EQ(pipe2(wake, O_CLOEXEC | O_NONBLOCK), 0);
  wake_read_ = wake[0];
  wake_write_ = wake[1];
  thread_ = std::thread([this] { Run(); });
}

TcpRelay::~TcpRelay() {
  stopping_ = true;
  EXPECT_EQ(write(wake_write_, "x", 1), 1);
  thread_.join();
  for (const int fd : {listener_, wake_read_, wake_write_}) close(fd);
}

void TcpRelay::StallAll() {
  stalled_ = true;
  EXPECT_EQ(write(wake_write_, "x", 1), 1);
}

void TcpRelay::ResetAll() {
  reset_ = true;
  EXPECT_EQ(write(wake_write_, "x", 1), 1);
}

void TcpRelay::Run() {
  while (!stopping_) {
    std::vector<pollfd> fds = {{wake_read_, POLLIN, 0}, {listener_, POLLIN, 0}};
    for (const auto& connection : connections_) {
      for (const Direction* way : {&connection->up, &connection->down}) {
        const bool passes = !stalled_;
        // A stalled server's end is watched for its close alone.
        const short read_events = passes && way->wants_to_read() ? POLLIN : 0;
        fds.push_back({way->from, static_cast<short>(read_events | POLLRDHUP), 0});
        fds.push_back({passes && !way->pending.empty() ? way->to : -1, POLLOUT, 0});
      }
    }
    if (poll(fds.data(), fds.size(), -1) < 0) continue;
    char drained[16];
    while (read(wake_read_, drained, sizeof(drained)) > 0) {
    }
    if (reset_.exchange(false)) {
      CloseAll(/*reset=*/true);
      continue;
    }
    size_t polled = 2;
    std::vector<std::unique_ptr<Connection>> open;
    for (auto& connection : connections_) {
      const short client_events = fds[polled].revents;
      const short server_events = fds[polled + 2].revents;
      polled += 4;
      bool is_open = true;
      if (!stalled_) {
        is_open = connection->up.Move() && connection->down.Move();
      }
      if ((server_events & (POLLRDHUP | POLLHUP | POLLERR)) != 0 &&
          (stalled_ || !connection->down.wants_to_read())) {
        is_open = false;
      }
      if ((client_events & (POLLHUP | POLLERR)) != 0) is_open = false;
      if (connection->up.bytes_left == 0 && !connection->counted_as_stalled) {
        connection->counted_as_stalled = true;
        Count(&num_stalled_);
      }
      if (is_open) {
        open.push_back(std::move(connection));
        continue;
      }
      if ((server_events & (POLLRDHUP | POLLHUP | POLLERR)) != 0) {
        Count(&num_closed_by_server_);
      }
      connection->Close(/*reset=*/false);
    }
    connections_ = std::move(open);
    if ((fds[1].revents & POLLIN) != 0) Accept();
  }
  CloseAll(/*reset=*/true);
}

void TcpRelay::Accept() {
  const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (client < 0) return;
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(server_port_);
  if (connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    close(client);
    close(server);
    return;
  }
  auto connection = std::make_unique<Connection>();
  connection->up = {client, server, limits_.max_up_bytes, {}};
  connection->down = {server, client, limits_.max_down_bytes, {}};
  connections_.push_back(std::move(connection));
}

void TcpRelay::CloseAll(bool reset) {
  for (const auto& connection : connections_) connection->Close(reset);
  connections_.clear();
}

bool TcpRelay::AwaitStalled(int num_connections, absl::Duration timeout) const {
  return AwaitAtLeast(num_stalled_, num_connections, timeout);
}

bool TcpRelay::AwaitClosedByServer(int num_connections, absl::Duration timeout) const {
  return AwaitAtLeast(num_closed_by_server_, num_connections, timeout);
}

void TcpRelay::Count(int* counter) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++*counter;
  }
  changed_.notify_all();
}

bool TcpRelay::AwaitAtLeast(const int& counter, int value, absl::Duration timeout) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, absl::ToChronoMilliseconds(timeout),
                           [&] { return counter >= value; });
}

}  // namespace expertmesh
