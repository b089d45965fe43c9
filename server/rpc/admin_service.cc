#include "server/rpc/admin_service.h"

#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "expertmesh/v1/admin.grpc.pb.h"
#include "grpcpp/server_context.h"
#include "kernels/base/steady_now.h"
#include "server/ops/call_error.h"
#include "server/ops/duration_text.h"
#include "server/ops/start_thread.h"
#include "server/rpc/status_mapping.h"

namespace expertmesh {
namespace {

// Answered from a thread of ours, so the server must not go before gRPC has sent it.
class DrainReactor final : public grpc::ServerUnaryReactor {
 public:
  explicit DrainReactor(OpenCalls* open_calls) : open_calls_(open_calls) { open_calls_->Begin(); }
  void OnDone() override {
    OpenCalls* const open_calls = open_calls_;
    delete this;
    open_calls->End();
  }

 private:
  OpenCalls* const open_calls_;
};

class AdminServiceImpl final : public v1::AdminService::CallbackService {
 public:
  explicit AdminServiceImpl(AdminServiceOptions options) : options_(std::move(options)) {}
  ~AdminServiceImpl() override {
    if (drainer_.joinable()) drainer_.join();
  }

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::GetStatusRequest*,
                                      v1::GetStatusResponse* response) override {
    const absl::Time arrival = SteadyNow();
    *response = options_.status();
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    Answer(reactor, CallMethod::kGetStatus, absl::OkStatus(), arrival);
    return reactor;
  }

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext*, const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override {
    const absl::Time arrival = SteadyNow();
    grpc::ServerUnaryReactor* reactor = new DrainReactor(options_.open_calls);
    if (request->timeout_micros() < 0) {
      Answer(reactor, CallMethod::kDrain,
             InvalidFieldError("timeout_micros", request->timeout_micros(), "0 or more"), arrival);
      return reactor;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back({reactor, response, arrival});
    if (waiting_.size() == 1) {
      // The one before has nothing left to wait for.
      if (drainer_.joinable()) drainer_.join();
      const absl::Duration timeout = absl::Microseconds(request->timeout_micros());
      absl::StatusOr<std::thread> started = StartThread([this, timeout] { RunDrain(timeout); });
      if (started.ok()) {
        drainer_ = *std::move(started);
      } else {
        waiting_.clear();
        Answer(reactor, CallMethod::kDrain, started.status(), arrival);
      }
    }
    return reactor;
  }

 private:
  struct WaitingDrain {
    grpc::ServerUnaryReactor* reactor;
    v1::DrainResponse* response;
    absl::Time arrival;
  };

  void RunDrain(absl::Duration timeout) {
    const absl::StatusOr<v1::DrainResponse> answer = options_.drain(timeout);
    std::vector<WaitingDrain> waiting;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      waiting.swap(waiting_);
    }
    for (const WaitingDrain& call : waiting) {
      if (answer.ok()) *call.response = *answer;
      Answer(call.reactor, CallMethod::kDrain, answer.status(), call.arrival);
    }
  }

  void Answer(grpc::ServerUnaryReactor* reactor, CallMethod method, const absl::Status& status,
              absl::Time arrival) const {
    options_.metrics->CountCall(method, status.code(),
                                absl::ToDoubleSeconds(SteadyNow() - arrival));
    reactor->Finish(ToGrpcStatus(status));
  }

  const AdminServiceOptions options_;
  std::mutex mutex_;
  std::vector<WaitingDrain> waiting_;  // not empty: `drainer_` has not taken them yet
  std::thread drainer_;
};

v1::RankState StateToWire(MemberState state) {
  switch (state) {
    case MemberState::kMissing:
      return v1::RANK_STATE_MISSING;
    case MemberState::kLost:
      return v1::RANK_STATE_LOST;
    case MemberState::kLeft:
      return v1::RANK_STATE_LEFT;
    case MemberState::kRefused:
      return v1::RANK_STATE_REFUSED;
    case MemberState::kLoading:
      return v1::RANK_STATE_LOADING;
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

std::string AgeText(absl::Duration age) {
  age = absl::Trunc(age, absl::Milliseconds(100));
  return age == absl::ZeroDuration() ? "just now" : absl::StrCat(DurationText(age), " ago");
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
  queue->set_num_steps_in_flight(snapshot.steps_in_flight);
  queue->set_oldest_age_micros(absl::ToInt64Microseconds(snapshot.oldest_queued_age));
  response->set_num_lanes(snapshot.num_lanes);
  response->set_num_steps(snapshot.steps);
  response->set_num_replays(snapshot.steps_lost);
}

void FillCallStatus(const ServerMetrics& metrics, v1::GetStatusResponse* response) {
  response->set_num_requests_ok(metrics.num_ok(CallMethod::kForward) +
                                metrics.num_ok(CallMethod::kForwardStream));
  response->set_num_requests_failed(metrics.num_failed(CallMethod::kForward) +
                                    metrics.num_failed(CallMethod::kForwardStream));
}

void FillUsage(const GroupUsage& usage, v1::GetStatusResponse* response) {
  const std::vector<RankUsage> ranks = usage.Snapshot();
  response->set_load_imbalance(LoadImbalance(ranks));
  if (response->epoch() != 0) {
    response->set_epoch_age_micros(absl::ToInt64Microseconds(SteadyNow() - usage.epoch_formed()));
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    v1::RankStatus* out = response->mutable_ranks(static_cast<int>(rank));
    out->set_num_steps(ranks[rank].epoch.num_steps);
    out->set_num_expert_rows(ranks[rank].epoch.num_expert_rows);
    out->set_compute_micros(ranks[rank].epoch.compute_micros);
  }
}

void FillMemberStatus(absl::Span<const MemberView> members, v1::GetStatusResponse* response) {
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const MemberView& member = members[rank];
    v1::RankStatus* out = response->add_ranks();
    out->set_ep_rank(static_cast<int32_t>(rank));
    out->set_memory_used_bytes(member.memory_used_bytes);
    out->set_memory_limit_bytes(member.memory_limit_bytes);
    out->set_load_progress(member.load_progress);
    out->set_address(member.address);
    out->set_state(StateToWire(member.state));
    out->set_num_experts(member.num_experts);
    out->set_weight_bytes(member.weight_bytes);
    out->set_heartbeat_age_micros(absl::ToInt64Microseconds(member.heartbeat_age));
    out->set_instruction_set(member.instruction_set);
    if (member.state == MemberState::kMissing) {
      out->set_detail("no expert server with this number has joined");
    } else if (member.state == MemberState::kLost || member.state == MemberState::kLeft) {
      out->set_detail(absl::StrCat(member.why, " (", AgeText(member.why_age), ")"));
    } else if (member.state == MemberState::kRefused) {
      out->set_detail(absl::StrCat(AgeText(member.why_age), ": ", member.why));
    } else if (!member.why.empty()) {
      out->set_detail(member.why);
    } else if (member.state == MemberState::kForming) {
      out->set_detail("forming an epoch");
    }
    if (!member.rival_why.empty()) {
      std::string& detail = *out->mutable_detail();
      absl::StrAppend(&detail, detail.empty() ? "" : "; ", "another server was refused ",
                      AgeText(member.rival_age), ": ", member.rival_why);
    }
  }
}

}  // namespace expertmesh
