#ifndef EXPERTMESH_SERVER_RPC_RANK_SERVICE_H_
#define EXPERTMESH_SERVER_RPC_RANK_SERVICE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/cluster/remote_expert_group.h"

namespace grpc {
class Service;
}

namespace expertmesh {

inline constexpr char kRankServiceName[] = "expertmesh.v1.RankService";

struct RankServiceOptions {
  RemoteExpertGroup* group = nullptr;           // outlives the service
  std::map<std::string, int64_t> hidden_sizes;  // by model
  int64_t max_step_tokens = 0;
  // Subject alternative names that a rank's certificate must have one of; empty: any that the
  // listener lets in.
  std::vector<std::string> allowed_names;
};

// What expert servers dial; not for clients, so on a listener of its own.
std::unique_ptr<grpc::Service> NewRankService(RankServiceOptions options);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_RANK_SERVICE_H_
