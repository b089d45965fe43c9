#ifndef EXPERTMESH_SERVER_COMM_TCP_NOTICES_H_
#define EXPERTMESH_SERVER_COMM_TCP_NOTICES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "server/comm/unique_fd.h"

namespace expertmesh {

// The control connection with one peer: each end says at most one thing, why it gives up. Never
// blocks. Not thread safe.
class TcpNotices {
 public:
  // Takes over a connected, non-blocking socket, or none.
  explicit TcpNotices(UniqueFd fd) : fd_(std::move(fd)) {}

  int fd() const { return fd_.get(); }
  void Close() { fd_.reset(); }

  // Messages are cut to kMaxMessageBytes.
  void Say(const absl::Status& reason) const;
  // The peer's reason (UNAVAILABLE, too, when the connection has ended without one); none while it
  // says nothing. DATA_LOSS when it cannot be understood. `ep_rank` is the peer's, for messages.
  std::optional<absl::Status> Hear(int32_t ep_rank);

 private:
  static constexpr uint32_t kMaxMessageBytes = 2000;

  UniqueFd fd_;
  std::string heard_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_TCP_NOTICES_H_
