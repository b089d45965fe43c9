#ifndef EXPERTMESH_SERVER_OPS_LISTEN_ADDRESS_H_
#define EXPERTMESH_SERVER_OPS_LISTEN_ADDRESS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace expertmesh {

// Whether a flag's value is "host:port" or "[v6]:port" with a port of 0 to 65535: libraries take a
// larger one modulo 65536 and an empty one for some other. INVALID_ARGUMENT names the flag, the
// value and what is expected. Whether the address can be bound is not asked.
absl::Status CheckListenAddress(absl::string_view flag, absl::string_view value);

// Likewise an address to call, as gRPC takes it: host:port with a port of its own, for gRPC would
// take some other for one that is missing, or a target with a scheme (dns:, ipv4:, ipv6:, unix:),
// which is not looked at.
absl::Status CheckCallAddress(absl::string_view flag, absl::string_view value);

// Whether only this machine reaches a listen address: a loopback one, "localhost" or "unix:path".
// A name otherwise counts as reached from anywhere.
bool IsLocalListenAddress(absl::string_view value);

// The address that clients dial: `listen` with the port that the system chose.
std::string AddressWithPort(const std::string& listen, int port);

// Nothing for an empty path. Readers see the whole number or no file. UNAVAILABLE.
absl::Status WritePortFile(const std::string& path, int port);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_LISTEN_ADDRESS_H_
