#ifndef EXPERTMESH_SERVER_RPC_SERVER_SOCKETS_H_
#define EXPERTMESH_SERVER_RPC_SERVER_SOCKETS_H_

#include <cstdint>

namespace expertmesh {

// The sockets of this process that are bound to one TCP port of a server: gRPC shows no more of
// them than that number. Of a "unix:" address (port 0) there are none here. Thread safe; nothing
// blocks.

// That the kernel holds for the peers of connections.
int64_t UnsentBytes(int port);

// The listening sockets take no connection any more, and those that wait to be taken are reset.
// gRPC finds them broken and logs that.
void StopTakingConnections(int port);

// Ends all connections, as if the peers had: gRPC lets go of them with their calls.
void EndConnections(int port);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_SERVER_SOCKETS_H_
