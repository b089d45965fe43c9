#ifndef EXPERTMESH_SERVER_COMM_SOCKET_ADDRESS_H_
#define EXPERTMESH_SERVER_COMM_SOCKET_ADDRESS_H_

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace expertmesh {

// A numeric IPv4 or IPv6 address with its port.
class SocketAddress {
 public:
  // INVALID_ARGUMENT for host names and wildcard addresses.
  static absl::StatusOr<SocketAddress> Parse(const std::string& address, uint16_t port);
  // UNAVAILABLE, with what the system says, unless this machine may listen there now: for a flag,
  // whose mistakes are to be found before anything long begins. Errors as Parse.
  static absl::Status CheckListen(const std::string& address);
  static SocketAddress OfSocket(int fd);  // where it is bound; fd must be a socket

  SocketAddress() = default;
  sockaddr* data() { return reinterpret_cast<sockaddr*>(&storage_); }
  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const { return size_; }
  socklen_t* mutable_size() { return &size_; }
  int family() const { return storage_.ss_family; }
  uint16_t port() const;
  std::string ToString() const;  // 127.0.0.1:80, [::1]:80

 private:
  sockaddr_storage storage_ = {};
  socklen_t size_ = sizeof(storage_);
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_SOCKET_ADDRESS_H_
