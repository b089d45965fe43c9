#include "server/comm/socket_address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>

#include "absl/strings/str_cat.h"
#include "server/comm/unique_fd.h"

namespace expertmesh {

absl::StatusOr<SocketAddress> SocketAddress::Parse(const std::string& address, uint16_t port) {
  SocketAddress result;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&result.storage_);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&result.storage_);
  bool wildcard = false;
  if (inet_pton(AF_INET, address.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    result.size_ = sizeof(sockaddr_in);
    wildcard = v4->sin_addr.s_addr == htonl(INADDR_ANY);
  } else if (inet_pton(AF_INET6, address.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    result.size_ = sizeof(sockaddr_in6);
    // ::ffff:0.0.0.0 is IPv4's, written as IPv6.
    const in6_addr& ip = v6->sin6_addr;
    wildcard = IN6_IS_ADDR_UNSPECIFIED(&ip) ||
               (IN6_IS_ADDR_V4MAPPED(&ip) && ip.s6_addr32[3] == htonl(INADDR_ANY));
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("'", address, "' is not a numeric IPv4 or IPv6 address"));
  }
  if (wildcard) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", address, "' means every network of this machine; name one address"));
  }
  return result;
}

absl::Status SocketAddress::CheckListen(const std::string& address) {
  const absl::StatusOr<SocketAddress> parsed = Parse(address, 0);
  if (!parsed.ok()) return parsed.status();
  const UniqueFd listener(socket(parsed->family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener.valid() || bind(listener.get(), parsed->data(), parsed->size()) != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address, ": ", strerror(errno)));
  }
  return absl::OkStatus();
}

SocketAddress SocketAddress::OfSocket(int fd) {
  SocketAddress result;
  getsockname(fd, result.data(), result.mutable_size());
  return result;
}

uint16_t SocketAddress::port() const {
  return ntohs(family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_port
                                    : reinterpret_cast<const sockaddr_in*>(&storage_)->sin_port);
}

std::string SocketAddress::ToString() const {
  char text[INET6_ADDRSTRLEN] = "?";
  if (family() == AF_INET6) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_addr, text,
              sizeof(text));
    return absl::StrCat("[", text, "]:", port());
  }
  inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(&storage_)->sin_addr, text,
            sizeof(text));
  return absl::StrCat(text, ":", port());
}

}  // namespace expertmesh
