#include "server/rpc/rank_channel.h"

#include <algorithm>

#include "grpcpp/channel.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "kernels/base/steady_now.h"
#include "server/rpc/grpc_deadline.h"

namespace expertmesh {
namespace {

constexpr int kReadChunkBytes = 1 << 20;
constexpr int kMinReadChunkBytes = 64 << 10;
constexpr int kConnectTimeoutMillis = 2000;

constexpr absl::Duration kBetweenStopChecks = absl::Milliseconds(50);

}  // namespace

std::shared_ptr<grpc::Channel> NewRankChannel(const RankLink& link, bool own_connection) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(-1);
  args.SetMaxSendMessageSize(-1);
  args.SetInt("grpc.experimental.tcp_read_chunk_size", kReadChunkBytes);
  args.SetInt("grpc.experimental.tcp_min_read_chunk_size", kMinReadChunkBytes);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  // Despite its name: what one attempt may take, TLS handshake included, on a busy machine.
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMillis);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  // Else all channels to one address share a connection.
  if (own_connection) args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(link.control_plane, link.credentials, args);
}

void WaitWhileConnecting(grpc::Channel* channel, absl::Duration duration,
                         const std::function<bool()>& stopped) {
  const absl::Time end = SteadyNow() + duration;
  for (absl::Time now = SteadyNow(); now < end && !stopped(); now = SteadyNow()) {
    // Not asked to connect: who is let in and then thrown out would be so over and over.
    const grpc_connectivity_state state = channel->GetState(/*try_to_connect=*/false);
    channel->WaitForStateChange(state, ToGrpcDeadline(std::min(end - now, kBetweenStopChecks)));
  }
}

}  // namespace expertmesh
