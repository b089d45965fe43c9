#ifndef EXPERTMESH_SERVER_RPC_TLS_CREDENTIALS_H_
#define EXPERTMESH_SERVER_RPC_TLS_CREDENTIALS_H_

#include <memory>
#include <string>

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace expertmesh {

// Paths of PEM files. They are looked at every second: what changed is used for connections that
// are made from then on, those that stand stay. Certificate and key should change at once (a
// renamed folder, a symbolic link, as Kubernetes does it); while they do not fit each other new
// connections fail.
struct TlsFiles {
  std::string certificate;  // chain
  std::string key;
  std::string ca;
  bool empty() const { return certificate.empty() && ca.empty(); }
};

// With a certificate: TLS; with a CA too, clients must show a certificate of it. Nothing: no TLS.
// One thread each, for as long as the credentials are held.
std::shared_ptr<grpc::ServerCredentials> NewServerCredentials(const TlsFiles& files);

// With a CA: TLS, the server must show a certificate of it for the name that is dialled; with a
// certificate too it is shown that. Nothing: no TLS.
std::shared_ptr<grpc::ChannelCredentials> NewChannelCredentials(const TlsFiles& files);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_TLS_CREDENTIALS_H_
