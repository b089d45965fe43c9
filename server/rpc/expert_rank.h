#ifndef EXPERTMESH_SERVER_RPC_EXPERT_RANK_H_
#define EXPERTMESH_SERVER_RPC_EXPERT_RANK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/buffer.h"
#include "server/cluster/membership.h"
#include "server/comm/nccl_functions.h"
#include "server/rank/rank_engine.h"
#include "server/rpc/rank_channel.h"

namespace expertmesh {

// How a rank on a GPU exchanges rows: over NCCL, agreed on over TCP (see NcclCommunicatorParams).
struct NcclRankOptions {
  std::shared_ptr<NcclFunctions> functions;  // null: the rank's rows are in host memory
  int32_t device_index = 0;
  std::function<void(const absl::Status&)> on_stuck_abort;
};

struct ExpertRankOptions {
  RankLink link;
  RankEngine* engine = nullptr;          // loaded; outlives the rank, which alone uses it
  std::shared_ptr<Allocator> allocator;  // host memory for what is received
  std::vector<ModelManifest> models;
  std::map<std::string, int64_t> hidden_sizes;  // by model
  // As TcpMeshParams.
  std::string bind_address = "127.0.0.1";
  std::string advertise_address;
  NcclRankOptions nccl;
  // The engine's device is lost (RankBackend::device_status): all that the rank could still do is
  // to fail every step, and only another process may have the device again. Called where that is
  // found, any thread, maybe more than once. Null: nobody asks the device.
  std::function<void(const absl::Status&)> on_device_lost;
  // How long nobody may answer, or the rank's number may be taken, before Run gives up. Once it has
  // been a member, a control plane that does not answer is waited for without end: the weights are
  // dear.
  absl::Duration join_timeout = absl::Seconds(60);
};

// An expert server's life with its control plane: joins, forms epochs' communicators, runs steps,
// and joins again, with its weights, whenever the stream has ended.
class ExpertRank {
 public:
  explicit ExpertRank(ExpertRankOptions options);
  ~ExpertRank();

  // Blocking; once. OK after Stop. The control plane's refusal where trying again is of no use;
  // UNAVAILABLE when nobody answered for join_timeout, ALREADY_EXISTS when the number was taken for
  // that long.
  absl::Status Run();
  // Takes leave of the control plane; Run returns soon. Any thread but gRPC's; blocks for half a
  // second at most.
  void Stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_EXPERT_RANK_H_
