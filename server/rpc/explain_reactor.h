#ifndef EXPERTMESH_SERVER_RPC_EXPLAIN_REACTOR_H_
#define EXPERTMESH_SERVER_RPC_EXPLAIN_REACTOR_H_

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/rpc/forward_reactor.h"
#include "server/rpc/serving_state.h"

namespace expertmesh {

// One Explain call. Owned by gRPC until OnDone, where it deletes itself.
class ExplainReactor final : public grpc::ServerUnaryReactor {
 public:
  ExplainReactor(const ForwardEnvironment& environment, grpc::CallbackServerContext* context,
                 grpc::ByteBuffer* request, grpc::ByteBuffer* response);
  void Start();
  void OnCancel() override;
  void OnDone() override;

 private:
  absl::StatusOr<grpc::ByteBuffer> Explain(const ServingBackend& backend);
  void Answer(absl::StatusOr<grpc::ByteBuffer> response);

  const ForwardEnvironment& environment_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const request_;
  grpc::ByteBuffer* const response_;
  const absl::Time arrival_;
  const absl::Time deadline_;
  ServingState::WaitId wait_id_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_EXPLAIN_REACTOR_H_
