#ifndef EXPERTMESH_SERVER_RPC_RANK_CHANNEL_H_
#define EXPERTMESH_SERVER_RPC_RANK_CHANNEL_H_

#include <memory>
#include <string>

namespace grpc {
class Channel;
}

namespace expertmesh {

// How a rank reaches its control plane.
struct RankLink {
  std::string control_plane;  // host:port of its rank listener
  // PEM texts; with a CA the control plane must show a certificate of it, and is shown ours.
  std::string tls_certificate;
  std::string tls_key;
  std::string tls_ca;
};

// A channel that dials for as long as it lives. Its last reference must not go on one of gRPC's own
// threads. `own_connection`: shares none with other channels of this process.
std::shared_ptr<grpc::Channel> NewRankChannel(const RankLink& link, bool own_connection);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_RANK_CHANNEL_H_
