#ifndef EXPERTMESH_SERVER_RPC_TLS_CREDENTIALS_H_
#define EXPERTMESH_SERVER_RPC_TLS_CREDENTIALS_H_

#include <memory>

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace expertmesh {

class TlsWatch;

// Files that change are used, within seconds, for connections that are made from then on; those
// that stand stay. A watch may serve several credentials, and is held by whoever wants changes to
// count; null: no TLS. One thread of gRPC's each, for as long as the credentials are held.

// TLS; with a CA, clients must show a certificate of it.
std::shared_ptr<grpc::ServerCredentials> NewServerCredentials(const TlsWatch* watch);

// TLS, the server must show a certificate of the CA for the name that is dialled; with a
// certificate too it is shown that.
std::shared_ptr<grpc::ChannelCredentials> NewChannelCredentials(const TlsWatch* watch);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_TLS_CREDENTIALS_H_
