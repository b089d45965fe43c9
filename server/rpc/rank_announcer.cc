#include "server/rpc/rank_announcer.h"

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "expertmesh/v1/rank.grpc.pb.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "server/cluster/memory_need.h"
#include "server/ops/logging.h"
#include "server/ops/start_thread.h"
#include "server/rpc/grpc_deadline.h"
#include "server/rpc/status_mapping.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(2);
constexpr absl::Duration kFirstInterval = absl::Milliseconds(200);
constexpr absl::Duration kMinInterval = absl::Milliseconds(10);
constexpr absl::Duration kMaxInterval = absl::Seconds(10);

}  // namespace

RankAnnouncer::RankAnnouncer(RankAnnouncerOptions options) : options_(std::move(options)) {
  absl::StatusOr<std::thread> started = StartThread([this] { Run(); });
  if (started.ok()) {
    thread_ = *std::move(started);
  } else {
    LogWarning("the control plane will not see this rank load",
               {{"why", started.status().message()}});
  }
}

RankAnnouncer::~RankAnnouncer() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    if (call_ != nullptr) call_->TryCancel();
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void RankAnnouncer::Run() {
  const std::shared_ptr<grpc::Channel> channel =
      NewRankChannel(options_.link, /*own_connection=*/true);
  const std::unique_ptr<v1::RankService::Stub> stub = v1::RankService::NewStub(channel);
  v1::HeartbeatRequest request;
  request.set_ep_rank(options_.ep_rank);
  request.set_ep_size(options_.ep_size);
  request.set_comm_address(options_.comm_address);
  request.set_instruction_set(options_.instruction_set);
  request.set_state(v1::RANK_STATE_LOADING);
  absl::Duration interval = kFirstInterval;
  bool was_refused = false;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    grpc::ClientContext context;
    context.set_deadline(ToGrpcDeadline(kCallTimeout));
    call_ = &context;
    lock.unlock();
    request.set_load_progress(options_.load_progress());
    request.set_memory_used_bytes(ResidentMemoryBytes());
    v1::HeartbeatResponse response;
    const absl::Status status = FromGrpcStatus(stub->Heartbeat(&context, request, &response));
    if (status.ok()) {
      interval = std::clamp(absl::Microseconds(response.heartbeat_interval_micros()), kMinInterval,
                            kMaxInterval);
    } else if ((absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status) ||
                absl::IsPermissionDenied(status)) &&
               !std::exchange(was_refused, true)) {
      // Better known now than when everything is loaded.
      LogWarning("the control plane will refuse this rank", {{"why", status.message()}});
    }
    lock.lock();
    call_ = nullptr;
    if (status.ok()) {
      changed_.wait_for(lock, absl::ToChronoNanoseconds(interval), [this] { return stopped_; });
      continue;
    }
    lock.unlock();
    WaitWhileConnecting(channel.get(), interval, [this] {
      const std::lock_guard<std::mutex> own_lock(mutex_);
      return stopped_;
    });
    lock.lock();
  }
}

}  // namespace expertmesh
