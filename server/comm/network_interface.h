#ifndef EXPERTMESH_SERVER_COMM_NETWORK_INTERFACE_H_
#define EXPERTMESH_SERVER_COMM_NETWORK_INTERFACE_H_

#include <string>

#include "absl/status/statusor.h"

namespace expertmesh {

// "eth0" for a numeric IPv4 or IPv6 address of this machine: what software that takes no addresses
// can be bound by. INVALID_ARGUMENT as SocketAddress::Parse, NOT_FOUND for an address that is not
// this machine's.
absl::StatusOr<std::string> InterfaceOfAddress(const std::string& address);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_NETWORK_INTERFACE_H_
