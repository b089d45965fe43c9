#ifndef EXPERTMESH_SERVER_RPC_RANK_CHANNEL_H_
#define EXPERTMESH_SERVER_RPC_RANK_CHANNEL_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"

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

// Waits on behalf of a channel that is to connect: gRPC goes on with an attempt only while a thread
// is in a call or a wait such as this one (else once in 5 s, which no TLS handshake survives).
// Returns after `duration`, or soon after `stopped` says so. Not on gRPC's threads.
void WaitWhileConnecting(grpc::Channel* channel, absl::Duration duration,
                         const std::function<bool()>& stopped);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_RANK_CHANNEL_H_
