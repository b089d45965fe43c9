#include "server/rpc/expert_rank.h"

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/generic/generic_stub.h"
#include "kernels/base/steady_now.h"
#include "server/cluster/membership.h"
#include "server/cluster/memory_need.h"
#include "server/ops/call_error.h"
#include "server/ops/logging.h"
#include "server/ops/start_thread.h"
#include "server/rpc/expert_rank_impl.h"
#include "server/rpc/grpc_deadline.h"
#include "server/rpc/rank_channel.h"
#include "server/rpc/rank_service.h"
#include "server/rpc/status_mapping.h"
#include "server/rpc/wire_enums.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kMinBackoff = absl::Milliseconds(50);
constexpr absl::Duration kMaxBackoff = absl::Milliseconds(500);
constexpr absl::Duration kJoinCallTimeout = absl::Seconds(5);

// Whether another try may have another answer. Of a rank that was a member only the control plane's
// own word ends it: what a proxy says, or whoever has the port while the control plane is away,
// must not cost it the weights that it has loaded.
bool MayRetry(const absl::Status& status, bool was_member) {
  const std::optional<CallErrorDetails> details = GetCallErrorDetails(status);
  if (!details.has_value()) {
    return was_member || absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
           absl::IsCancelled(status);
  }
  switch (details->reason) {
    case ErrorReason::kInvalidField:
    case ErrorReason::kWrongModel:
    case ErrorReason::kWrongEpSize:
    case ErrorReason::kWrongInstructionSet:
    case ErrorReason::kProtocolMismatch:
    case ErrorReason::kRankNotAllowed:
      return false;
    default:
      return true;
  }
}

// What gRPC says of an attempt that was given up, whatever kept it from getting on.
bool IsVague(const absl::Status& status) {
  if (absl::IsDeadlineExceeded(status) || absl::IsCancelled(status)) return true;
  for (const char* words : {"shutdown", "timed out", "Socket closed", "Connection reset"}) {
    if (absl::StrContains(status.message(), words)) return true;
  }
  return false;
}

// Both where the last one alone would not tell the cause.
std::string Reasons(const absl::Status& telling, const absl::Status& last) {
  if (telling.ok() || telling.message() == last.message()) return std::string(last.message());
  return absl::StrCat(telling.message(), "; last: ", last.message());
}

}  // namespace

ExpertRank::Impl::Impl(ExpertRankOptions o) : options(std::move(o)) {
  std::random_device random;
  instance = (uint64_t{random()} << 32) | random();
}

ExpertRank::ExpertRank(ExpertRankOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

ExpertRank::~ExpertRank() = default;

void ExpertRank::Stop() {
  std::shared_ptr<RankSession> session;
  {
    const std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->stopped = true;
    session = impl_->session;
    impl_->changed.notify_all();
  }
  if (session != nullptr) session->Leave();
}

bool ExpertRank::Impl::Wait(absl::Duration duration) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait_for(lock, absl::ToChronoNanoseconds(duration), [this] { return stopped; });
  return !stopped;
}

int64_t ExpertRank::Impl::MemoryUsedBytes() const {
  // Not device_free_bytes: every heartbeat comes here, and must not wait for a driver that hangs.
  return options.engine->backend().device_allocator()->device() == Device{}
             ? ResidentMemoryBytes()
             : options.engine->weight_bytes();
}

v1::JoinRequest ExpertRank::Impl::MakeJoinRequest() const {
  v1::JoinRequest request;
  request.set_protocol_version(kRankProtocolVersion);
  request.set_ep_rank(options.engine->ep_rank());
  request.set_ep_size(options.engine->ep_size());
  request.set_instance(instance);
  request.set_comm_address(options.advertise_address.empty() ? options.bind_address
                                                             : options.advertise_address);
  request.set_instruction_set(options.engine->backend().instruction_set());
  request.set_device(options.engine->backend().device_name());
  request.set_weight_bytes(options.engine->weight_bytes());
  const std::optional<int64_t> device_bytes = options.engine->backend().device_free_bytes();
  const int64_t free_bytes = device_bytes.value_or(AvailableMemoryBytes().value_or(0));
  request.set_memory_limit_bytes(free_bytes == 0 ? 0 : free_bytes + MemoryUsedBytes());
  for (const ModelManifest& manifest : options.models) {
    v1::ModelManifest& model = *request.add_models();
    model.set_model(manifest.model);
    model.set_fingerprint(manifest.fingerprint);
    model.set_weight_dtype(DTypeToWire(manifest.weight_dtype));
    for (const LayerManifest& held : manifest.layers) {
      v1::ExpertManifest& layer = *model.add_layers();
      layer.set_layer(held.layer);
      layer.set_num_experts(held.num_experts);
      layer.mutable_expert_ids()->Add(held.expert_ids.begin(), held.expert_ids.end());
    }
  }
  return request;
}

absl::StatusOr<v1::JoinResponse> ExpertRank::Impl::Join() {
  grpc::ClientContext context;
  context.set_deadline(ToGrpcDeadline(kJoinCallTimeout));
  v1::JoinResponse response;
  const absl::Status status = FromGrpcStatus(stub->Join(&context, MakeJoinRequest(), &response));
  if (!status.ok()) return status;
  return response;
}

absl::Status ExpertRank::Run() {
  Impl& impl = *impl_;
  const std::string& address = impl.options.link.control_plane;
  impl.channel = NewRankChannel(impl.options.link, /*own_connection=*/false);
  impl.stub = v1::RankService::NewStub(impl.channel);
  bool was_member = false;
  absl::Time failing_since = absl::InfinitePast();
  absl::Duration backoff = kMinBackoff;
  absl::StatusCode last_code = absl::StatusCode::kOk;
  absl::Status telling;  // the last error of this failing that says why
  while (impl.Wait(absl::ZeroDuration())) {
    const absl::StatusOr<v1::JoinResponse> membership = impl.Join();
    if (membership.ok()) {
      was_member = true;
      failing_since = absl::InfinitePast();
      backoff = kMinBackoff;
      last_code = absl::StatusCode::kOk;
      telling = absl::OkStatus();
      LogInfo("joined the group", {{"control_plane", address},
                                   {"ep_rank", impl.options.engine->ep_rank()},
                                   {"member", membership->member_id()}});
      const absl::Status status = impl.RunSession(*membership);
      if (!impl.Wait(status.ok() ? kMinBackoff : kMaxBackoff)) break;
      continue;
    }
    const absl::Status& error = membership.status();
    if (!MayRetry(error, was_member)) {
      if (absl::IsUnimplemented(error)) {
        return absl::UnimplementedError(absl::StrCat(
            "what answers at ", address,
            " is no control plane's --rank_listen; is it the address that clients call?"));
      }
      return absl::Status(error.code(), absl::StrCat("the control plane at ", address,
                                                     " refused this rank: ", error.message()));
    }
    if (!IsVague(error)) telling = error;
    const absl::Time now = SteadyNow();
    if (failing_since == absl::InfinitePast() || error.code() != last_code) {
      LogWarning("cannot join yet",
                 {{"control_plane", address},
                  {"why", error.ToString(absl::StatusToStringMode::kWithNoExtraData)}});
      if (failing_since == absl::InfinitePast()) failing_since = now;
    }
    last_code = error.code();
    const bool is_bounded = !was_member || absl::IsAlreadyExists(error);
    if (is_bounded && now + backoff - failing_since > impl.options.join_timeout) {
      return absl::Status(error.code(),
                          absl::StrCat("could not join at ", address, " in ",
                                       absl::FormatDuration(impl.options.join_timeout), ": ",
                                       Reasons(telling, error)));
    }
    WaitWhileConnecting(impl.channel.get(), backoff,
                        [&impl] { return !impl.Wait(absl::ZeroDuration()); });
    backoff = std::min(2 * backoff, kMaxBackoff);
  }
  return absl::OkStatus();
}

absl::Status ExpertRank::Impl::RunSession(const v1::JoinResponse& membership) {
  v1::StreamHello hello;
  hello.set_incarnation(membership.incarnation());
  hello.set_member_id(membership.member_id());
  hello.set_ep_rank(options.engine->ep_rank());
  {
    const std::lock_guard<std::mutex> lock(epoch_mutex);
    last_ended = 0;
  }
  grpc::GenericStub generic_stub(channel);
  const std::shared_ptr<RankSession> own = RankSession::Start(
      &generic_stub, options.allocator.get(), hello,
      [this](uint64_t ended, const absl::Status& reason) { AbortEpoch(ended, reason); });
  bool was_stopped;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    session = own;
    was_stopped = stopped;
  }
  if (was_stopped) own->Leave();
  absl::StatusOr<std::thread> heartbeats =
      StartThread([this, &membership] { SendHeartbeats(membership); });
  absl::Status status = heartbeats.status();
  std::vector<std::thread> lanes;
  for (int32_t lane = 1; lane < kMaxLanes && status.ok(); ++lane) {
    absl::StatusOr<std::thread> started =
        StartThread([this, &own, &membership] { RunLane(*own, membership); });
    status = started.status();
    if (started.ok()) lanes.push_back(*std::move(started));
  }
  // Steps that overlap count on all lanes.
  if (!status.ok()) own->Fail(status);
  RunLane(*own, membership);
  for (std::thread& lane : lanes) lane.join();
  const absl::Status why = own->Next().status();
  if (Wait(absl::ZeroDuration())) {
    const std::optional<CallErrorDetails> word = GetCallErrorDetails(why);
    const bool is_wanted = word.has_value() && word->reason == ErrorReason::kDraining;
    Log(is_wanted ? LogLevel::kInfo : LogLevel::kWarning, "lost its place in the group",
        {{"why", word.has_value() && !is_wanted
                     ? absl::StrCat("the control plane says: ", why.message())
                     : std::string(why.message())}});
  } else {
    LogInfo("left the group");
  }
  DropEpoch(why);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    session = nullptr;
    if (heartbeat_call != nullptr) heartbeat_call->TryCancel();
    changed.notify_all();
  }
  if (heartbeats.ok()) heartbeats->join();
  own->Finish();
  return status;
}

void ExpertRank::Impl::SendHeartbeats(const v1::JoinResponse& membership) {
  const absl::Duration interval =
      std::max(absl::Milliseconds(1), absl::Microseconds(membership.heartbeat_interval_micros()));
  const absl::Duration timeout = absl::Microseconds(membership.heartbeat_timeout_micros());
  const std::unique_ptr<v1::RankService::Stub> own_stub =
      v1::RankService::NewStub(NewRankChannel(options.link, /*own_connection=*/true));
  v1::HeartbeatRequest request;
  request.set_incarnation(membership.incarnation());
  request.set_member_id(membership.member_id());
  request.set_ep_rank(options.engine->ep_rank());
  request.set_load_progress(1);
  absl::Time last_answer = SteadyNow();
  std::unique_lock<std::mutex> lock(mutex);
  while (session != nullptr) {
    grpc::ClientContext context;
    context.set_deadline(ToGrpcDeadline(timeout));
    heartbeat_call = &context;
    lock.unlock();
    request.set_state(state);
    request.set_epoch(epoch);
    request.set_step(step);
    request.set_memory_used_bytes(MemoryUsedBytes());
    v1::HeartbeatResponse response;
    const grpc::Status status = own_stub->Heartbeat(&context, request, &response);
    lock.lock();
    heartbeat_call = nullptr;
    const absl::Time now = SteadyNow();
    if (status.ok()) last_answer = now;
    const bool is_member =
        !status.ok() || (response.member() && response.incarnation() == membership.incarnation());
    if (session != nullptr && (!is_member || now - last_answer > timeout)) {
      const std::shared_ptr<RankSession> lost = session;
      lock.unlock();
      lost->Cancel(is_member
                       ? absl::UnavailableError("the control plane does not answer heartbeats")
                       : CallError(ErrorReason::kStaleEpoch, response.why()));
      return;
    }
    changed.wait_for(lock, absl::ToChronoNanoseconds(interval),
                     [this] { return session == nullptr; });
  }
}

}  // namespace expertmesh
