#ifndef EXPERTMESH_SERVER_RPC_RANK_CHANNEL_H_
#define EXPERTMESH_SERVER_RPC_RANK_CHANNEL_H_

#include <memory>
#include <string>

namespace grpc {
class Channel;
class ChannelCredentials;
}  // namespace grpc

namespace expertmesh {

// How a rank reaches its control plane.
struct RankLink {
  std::string control_plane;  // host:port of its rank listener
  std::shared_ptr<grpc::ChannelCredentials> credentials;
};

// A channel that dials for as long as it lives. Its last reference must not go on one of gRPC's own
// threads. `own_connection`: shares none with other channels of this process.
std::shared_ptr<grpc::Channel> NewRankChannel(const RankLink& link, bool own_connection);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_RANK_CHANNEL_H_
