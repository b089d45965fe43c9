#include "server/comm/network_interface.h"

#include <errno.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <string.h>

#include "absl/strings/str_cat.h"
#include "server/comm/socket_address.h"

namespace expertmesh {
namespace {

bool IsSameHost(const sockaddr& a, const sockaddr& b) {
  if (a.sa_family != b.sa_family) return false;
  if (a.sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return a.sa_family == AF_INET6 &&
         memcmp(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

}  // namespace

absl::StatusOr<std::string> InterfaceOfAddress(const std::string& address) {
  const absl::StatusOr<SocketAddress> wanted = SocketAddress::Parse(address, 0);
  if (!wanted.ok()) return wanted.status();
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) {
    return absl::InternalError(absl::StrCat("getifaddrs: ", strerror(errno)));
  }
  std::string name;
  for (const ifaddrs* entry = interfaces; entry != nullptr && name.empty();
       entry = entry->ifa_next) {
    if (entry->ifa_addr != nullptr && IsSameHost(*entry->ifa_addr, *wanted->data())) {
      name = entry->ifa_name;
    }
  }
  freeifaddrs(interfaces);
  if (name.empty()) {
    return absl::NotFoundError(absl::StrCat("no network interface of this machine has ", address));
  }
  return name;
}

}  // namespace expertmesh
