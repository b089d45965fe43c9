#ifndef EXPERTMESH_SERVER_COMM_SOCKET_WATCH_H_
#define EXPERTMESH_SERVER_COMM_SOCKET_WATCH_H_

#include <sys/epoll.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/comm/unique_fd.h"

namespace expertmesh {

// What one thread waits on for many sockets, and by which others wake it. But for Wake not thread
// safe.
class SocketWatch {
 public:
  // RESOURCE_EXHAUSTED when the system has no means left. Once, before all else.
  absl::Status Open();
  // Tells once of what becomes ready, edge triggered, under `key`; the errors of Open.
  absl::Status Add(int fd, uint32_t events, uint64_t key);

  // Ends the Wait that is running, or the next one. Any thread, from Open until Close.
  void Wake();
  // What has become ready, without Wake's own; valid until the next call. Blocks, -1 for ever.
  absl::Span<const epoll_event> Wait(int timeout_millis);

  void Close();

 private:
  UniqueFd epoll_;
  UniqueFd wake_;
  std::vector<epoll_event> events_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_SOCKET_WATCH_H_
