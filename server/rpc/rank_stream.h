#ifndef EXPERTMESH_SERVER_RPC_RANK_STREAM_H_
#define EXPERTMESH_SERVER_RPC_RANK_STREAM_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/alarm.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/cluster/remote_expert_group.h"
#include "server/cluster/remote_rank.h"
#include "server/rpc/step_wire.h"

namespace expertmesh {

// The control plane's end of one rank's RunSteps stream: how RemoteExpertGroup reaches that rank.
// Lives until gRPC and the group have let go of it. Thread safe.
class RankStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                         public RemoteRank,
                         public std::enable_shared_from_this<RankStream> {
 public:
  // `group` and `hidden_sizes` (by model) outlive the stream. `peer_error`: why this peer may not
  // be a rank.
  static RankStream* Start(RemoteExpertGroup* group,
                           const std::map<std::string, int64_t>* hidden_sizes,
                           grpc::CallbackServerContext* context, absl::Status peer_error);

  int32_t ep_rank() const override { return ep_rank_; }
  Allocator* host_allocator() override { return group_->request_allocator(); }
  absl::Status CheckStep(const StepSlice& slice, const TokenShard& shard) const override;
  void RunStep(StepSlice slice, TokenShard shard, absl::Time deadline, StepDone done) override;
  void Abort(const absl::Status& reason) override;
  void EnterEpoch(uint64_t incarnation, uint64_t epoch, absl::Duration form_timeout,
                  absl::Duration operation_timeout) override;
  void EndEpoch(uint64_t epoch, const EpochEnd& end) override;
  void SkipOrder(uint64_t incarnation, uint64_t epoch, int64_t order) override;
  void Close(const absl::Status& reason) override;

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  struct PendingStep {
    StepHeader header;
    int64_t num_rows = 0;
    int64_t hidden_size = 0;
    StepDone done;
  };

  RankStream(RemoteExpertGroup* group, const std::map<std::string, int64_t>* hidden_sizes,
             grpc::CallbackServerContext* context);

  absl::Status Handle(ReceivedEvent event);
  absl::Status HandleResult(ReceivedResult result);
  void Write(grpc::ByteBuffer message);
  void Read();
  void Pump();
  void Cut();
  // The first reason stays.
  void End(const absl::Status& reason);

  RemoteExpertGroup* const group_;
  const std::map<std::string, int64_t>* const hidden_sizes_;
  grpc::CallbackServerContext* const context_;
  std::shared_ptr<RankStream> self_;  // until OnDone
  grpc::ByteBuffer read_;
  grpc::Alarm cut_;

  std::atomic<int32_t> ep_rank_{-1};    // from the hello
  std::atomic<uint64_t> member_id_{0};  // from the hello, when the group took it

  std::mutex mutex_;  // guards what follows
  std::deque<grpc::ByteBuffer> to_write_;
  bool pumping_ = false;
  bool wants_read_ = false;
  bool writing_ = false;
  bool waits_to_cut_ = false;  // cut_ is set
  bool must_cut_ = false;
  bool cancelled_ = false;
  bool finished_ = false;
  std::optional<absl::Status> end_;
  std::map<uint64_t, PendingStep> pending_;  // by step
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_RANK_STREAM_H_
