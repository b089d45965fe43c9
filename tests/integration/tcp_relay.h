#ifndef EXPERTMESH_TESTS_INTEGRATION_TCP_RELAY_H_
#define EXPERTMESH_TESTS_INTEGRATION_TCP_RELAY_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/time/time.h"

namespace expertmesh {

// Bad networks and bad clients: passes TCP connections on to a server on loopback until it is told
// to stop. A connection that is stalled stays open and is not read from, as if the peer were alive
// and busy with something else for ever. Thread safe.
class TcpRelay {
 public:
  // Of each connection; what is above stalls it in that direction.
  struct Limits {
    int64_t max_up_bytes = std::numeric_limits<int64_t>::max();  // client to server
    int64_t max_down_bytes = std::numeric_limits<int64_t>::max();
  };
  explicit TcpRelay(int server_port) : TcpRelay(server_port, Limits()) {}
  TcpRelay(int server_port, const Limits& limits);
  ~TcpRelay();
  TcpRelay(const TcpRelay&) = delete;
  TcpRelay& operator=(const TcpRelay&) = delete;

  int port() const { return port_; }

  // Also of connections to come.
  void StallAll();
  // Resets every connection at both ends, as the kernel does for a process that was killed.
  void ResetAll();

  // Blocks until that many connections have stalled upwards, or until the server has closed that
  // many; false after `timeout`.
  bool AwaitStalled(int num_connections, absl::Duration timeout) const;
  bool AwaitClosedByServer(int num_connections, absl::Duration timeout) const;

 private:
  struct Connection;

  void Run();
  void Accept();
  void CloseAll(bool reset);
  void Count(int* counter);
  bool AwaitAtLeast(const int& counter, int value, absl::Duration timeout) const;

  const int server_port_;
  const Limits limits_;
  int listener_ = -1;
  int wake_read_ = -1;
  int wake_write_ = -1;
  int port_ = 0;
  std::vector<std::unique_ptr<Connection>> connections_;  // the thread's
  std::atomic<bool> stalled_{false};
  std::atomic<bool> reset_{false};
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  int num_stalled_ = 0;
  int num_closed_by_server_ = 0;
  std::thread thread_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_TCP_RELAY_H_
