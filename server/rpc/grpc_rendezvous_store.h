#ifndef EXPERTMESH_SERVER_RPC_GRPC_RENDEZVOUS_STORE_H_
#define EXPERTMESH_SERVER_RPC_GRPC_RENDEZVOUS_STORE_H_

#include <cstdint>
#include <mutex>
#include <string>

#include "expertmesh/v1/rank.grpc.pb.h"
#include "grpcpp/client_context.h"
#include "server/comm/rendezvous_store.h"

namespace expertmesh {

// The store that the control plane keeps for one epoch, as a rank sees it. Only that epoch's keys
// (RendezvousKey) may be used; others are INVALID_ARGUMENT.
class GrpcRendezvousStore : public RendezvousStore {
 public:
  // `stub` outlives the store.
  GrpcRendezvousStore(v1::RankService::StubInterface* stub, uint64_t incarnation, uint64_t epoch);

  // Blocking, a few seconds at most.
  absl::Status Set(absl::string_view key, absl::string_view value) override;
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) override;

  // Ends calls in progress and refuses later ones, with CANCELLED.
  void Cancel();

 private:
  // Makes `context` the one to be cancelled.
  absl::Status Begin(grpc::ClientContext* context);
  void End();

  v1::RankService::StubInterface* const stub_;
  const uint64_t incarnation_;
  const uint64_t epoch_;
  std::mutex mutex_;
  bool cancelled_ = false;
  grpc::ClientContext* context_ = nullptr;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_GRPC_RENDEZVOUS_STORE_H_
