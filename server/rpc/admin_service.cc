#include "server/rpc/admin_service.h"

#include <utility>

#include "expertmesh/v1/admin.grpc.pb.h"
#include "grpcpp/server_context.h"
#include "server/ops/call_error.h"
#include "server/rpc/status_mapping.h"

namespace expertmesh {
namespace {

class AdminServiceImpl final : public v1::AdminService::CallbackService {
 public:
  explicit AdminServiceImpl(AdminServiceOptions options) : options_(std::move(options)) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::GetStatusRequest*,
                                      v1::GetStatusResponse* response) override {
    *response = options_.status();
    return Answer(context, CallMethod::kGetStatus, absl::OkStatus());
  }

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest*,
                                  v1::DrainResponse*) override {
    return Answer(context, CallMethod::kDrain,
                  CallError(ErrorReason::kNotImplemented,
                            "Drain is not served yet; SIGTERM drains this process"));
  }

 private:
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, CallMethod method,
                                   const absl::Status& status) const {
    options_.metrics->CountCall(method, status.code(), 0);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

  const AdminServiceOptions options_;
};

v1::RankState StateToWire(MemberState state) {
  switch (state) {
    case MemberState::kMissing:
      return v1::RANK_STATE_MISSING;
    case MemberState::kJoined:
    case MemberState::kStandingBy:
    case MemberState::kForming:
      return v1::RANK_STATE_STANDING_BY;
    case MemberState::kActive:
      return v1::RANK_STATE_ACTIVE;
    case MemberState::kTearingDown:
      return v1::RANK_STATE_TEARING_DOWN;
  }
  return v1::RANK_STATE_UNSPECIFIED;
}

}  // namespace

std::unique_ptr<grpc::Service> NewAdminService(AdminServiceOptions options) {
  return std::make_unique<AdminServiceImpl>(std::move(options));
}

void FillControlStatus(const ControlSnapshot& snapshot, v1::GetStatusResponse* response) {
  v1::QueueStatus* queue = response->mutable_queue();
  queue->set_num_requests(snapshot.queued_calls);
  queue->set_num_tokens(snapshot.queued_tokens);
  queue->set_num_bytes(snapshot.bytes_in_flight);
  queue->set_max_tokens(snapshot.max_tokens_in_flight);
  queue->set_max_bytes(snapshot.max_bytes_in_flight);
  queue->set_num_steps_in_flight(snapshot.step_running ? 1 : 0);
  response->set_num_steps(snapshot.steps);
  response->set_num_replays(snapshot.steps_lost);
  response->set_num_requests_ok(snapshot.calls_completed);
  response->set_num_requests_failed(snapshot.calls_failed + snapshot.calls_refused);
}

void FillMemberStatus(absl::Span<const MemberView> members, v1::GetStatusResponse* response) {
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const MemberView& member = members[rank];
    v1::RankStatus* out = response->add_ranks();
    out->set_ep_rank(static_cast<int32_t>(rank));
    out->set_address(member.address);
    out->set_state(StateToWire(member.state));
    out->set_num_experts(member.num_experts);
    out->set_weight_bytes(member.weight_bytes);
    out->set_heartbeat_age_micros(absl::ToInt64Microseconds(member.heartbeat_age));
    out->set_instruction_set(member.instruction_set);
    if (member.state == MemberState::kMissing) {
      out->set_detail("no expert server with this number has joined");
    } else {
      out->set_load_progress(1);
    }
    if (member.state == MemberState::kForming) out->set_detail("forming an epoch");
  }
}

}  // namespace expertmesh
