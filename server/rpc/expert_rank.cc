#include "server/rpc/expert_rank.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "expertmesh/v1/rank.grpc.pb.h"
#include "grpcpp/channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "kernels/base/steady_now.h"
#include "server/cluster/membership.h"
#include "server/cluster/memory_need.h"
#include "server/comm/in_process_communicator.h"
#include "server/comm/nccl_communicator.h"
#include "server/comm/tcp_communicator.h"
#include "server/ops/call_error.h"
#include "server/ops/logging.h"
#include "server/ops/start_thread.h"
#include "server/rpc/forward_encoder.h"
#include "server/rpc/grpc_deadline.h"
#include "server/rpc/grpc_rendezvous_store.h"
#include "server/rpc/rank_channel.h"
#include "server/rpc/rank_service.h"
#include "server/rpc/rank_session.h"
#include "server/rpc/status_mapping.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kMinBackoff = absl::Milliseconds(50);
constexpr absl::Duration kMaxBackoff = absl::Seconds(1);
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

// Codes that say all by themselves cross the link; a rank that was aborted by its peers says so.
absl::Status StatusForLink(const absl::Status& status) {
  if (!absl::IsAborted(status)) return status;
  return CallError(ErrorReason::kStepLost, status.message());
}

}  // namespace

struct ExpertRank::Impl {
  explicit Impl(ExpertRankOptions o) : options(std::move(o)) {
    std::random_device random;
    instance = (uint64_t{random()} << 32) | random();
  }

  v1::JoinRequest MakeJoinRequest() const;
  // Of the process, or what it holds on a GPU.
  int64_t MemoryUsedBytes() const;
  absl::StatusOr<v1::JoinResponse> Join();
  // Blocks until the session has ended, for whatever reason. RESOURCE_EXHAUSTED when it could not
  // begin.
  absl::Status RunSession(const v1::JoinResponse& membership);
  void SendHeartbeats(const v1::JoinResponse& membership);
  // One of several threads that take the session's commands in turns: who takes a slice lets
  // another one lead while it runs the step, so that steps overlap and none is handed over. Returns
  // when the session has ended.
  void RunLane(RankSession& own, const v1::JoinResponse& membership);
  void Obey(const v1::RunStepsResponse& command, const v1::JoinResponse& membership);
  // The communicator of an epoch; collective, blocks until all ranks have come.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(const v1::EpochBegin& begin);
  absl::Status FormEpoch(const v1::EpochBegin& begin, const v1::JoinResponse& membership);
  void DropEpoch(const absl::Status& reason);
  grpc::ByteBuffer RunStep(ReceivedSlice slice, ComputeTurns::Turn turn);
  // As soon as an epoch's end is known, on whatever thread, and maybe before its beginning has been
  // obeyed.
  void AbortEpoch(uint64_t ended, const absl::Status& reason);
  // False when the rank was stopped.
  bool Wait(absl::Duration duration);

  const ExpertRankOptions options;
  uint64_t instance = 0;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::RankService::Stub> stub;

  std::mutex lead;  // whose holder takes commands
  std::mutex steps_mutex;
  std::condition_variable steps_changed;
  int num_running_steps = 0;

  // What ends an epoch from outside of the threads that run it.
  std::mutex epoch_mutex;
  uint64_t last_ended = 0;                     // of the session's epochs
  absl::Status last_end;                       // why
  std::shared_ptr<GrpcRendezvousStore> store;  // while forming
  std::atomic<bool> give_up{false};            // forming

  // For heartbeats.
  std::atomic<v1::RankState> state{v1::RANK_STATE_STANDING_BY};
  std::atomic<uint64_t> epoch{0};
  std::atomic<uint64_t> step{0};

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  bool stopped = false;
  std::shared_ptr<RankSession> session;
  grpc::ClientContext* heartbeat_call = nullptr;
};

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
  return options.engine->backend().device_free_bytes().has_value() ? options.engine->weight_bytes()
                                                                   : ResidentMemoryBytes();
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
  while (impl.Wait(absl::ZeroDuration())) {
    const absl::StatusOr<v1::JoinResponse> membership = impl.Join();
    if (membership.ok()) {
      was_member = true;
      failing_since = absl::InfinitePast();
      backoff = kMinBackoff;
      last_code = absl::StatusCode::kOk;
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
      return absl::Status(
          error.code(),
          absl::StrCat("could not join at ", address, " in ",
                       absl::FormatDuration(impl.options.join_timeout), ": ", error.message()));
    }
    if (!impl.Wait(backoff)) break;
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
    LogWarning("lost its place in the group", {{"why", why.message()}});
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
      lost->Cancel(absl::UnavailableError(is_member
                                              ? "the control plane does not answer heartbeats"
                                              : "the control plane counts it as a member no more"));
      return;
    }
    changed.wait_for(lock, absl::ToChronoNanoseconds(interval),
                     [this] { return session == nullptr; });
  }
}

void ExpertRank::Impl::RunLane(RankSession& own, const v1::JoinResponse& membership) {
  std::unique_lock<std::mutex> leading(lead);
  while (true) {
    absl::StatusOr<ReceivedCommand> command = own.Next();
    if (!command.ok()) return;
    if (!command->slice.has_value()) {
      Obey(command->other, membership);
      continue;
    }
    ComputeTurns::Turn turn = options.engine->TakeTurn();
    {
      const std::lock_guard<std::mutex> lock(steps_mutex);
      ++num_running_steps;
    }
    leading.unlock();
    own.Write(RunStep(*std::move(command->slice), std::move(turn)));
    {
      const std::lock_guard<std::mutex> lock(steps_mutex);
      --num_running_steps;
      steps_changed.notify_all();
    }
    leading.lock();
  }
}

void ExpertRank::Impl::Obey(const v1::RunStepsResponse& command,
                            const v1::JoinResponse& membership) {
  v1::RunStepsRequest answer;
  if (command.has_epoch_begin()) {
    const v1::EpochBegin& begin = command.epoch_begin();
    const absl::Status status = FormEpoch(begin, membership);
    if (!status.ok()) {
      LogWarning("cannot form an epoch", {{"epoch", begin.epoch()}, {"why", status.message()}});
    }
    answer.mutable_epoch_ready()->set_epoch(begin.epoch());
    if (!status.ok()) *answer.mutable_epoch_ready()->mutable_status() = ToRpcStatus(status);
  } else if (command.has_epoch_end()) {
    const v1::EpochEnd& end = command.epoch_end();
    DropEpoch(absl::UnavailableError(end.reason()));
    answer.mutable_epoch_down()->set_epoch(end.epoch());
  } else if (command.has_order_skip()) {
    const v1::OrderSkip& skip = command.order_skip();
    options.engine->SkipOrder(skip.incarnation(), skip.epoch(), skip.order());
    return;
  } else {
    return;
  }
  session->Write(EncodeSmallMessage(answer));
}

absl::StatusOr<std::unique_ptr<Communicator>> ExpertRank::Impl::Connect(
    const v1::EpochBegin& begin) {
  RankEngine& engine = *options.engine;
  const bool has_device = options.nccl.functions != nullptr;
  if (engine.ep_size() == 1 && !has_device) {
    return std::move(NewInProcessCommunicators(1, engine.backend().copy_bytes()).front());
  }
  auto own_store =
      std::make_shared<GrpcRendezvousStore>(stub.get(), begin.incarnation(), begin.epoch());
  {
    const std::lock_guard<std::mutex> lock(epoch_mutex);
    if (last_ended >= begin.epoch()) return last_end;
    store = own_store;
    give_up = false;
  }
  const absl::Time deadline = SteadyNow() + absl::Microseconds(begin.timeout_micros());
  const absl::Duration operation_timeout = absl::Microseconds(begin.operation_timeout_micros());
  absl::StatusOr<std::unique_ptr<Communicator>> over_host = absl::UnknownError("");
  if (engine.ep_size() == 1) {
    over_host = std::move(NewInProcessCommunicators(1).front());
  } else {
    TcpCommunicatorParams params;
    params.mesh.ep_rank = engine.ep_rank();
    params.mesh.ep_size = engine.ep_size();
    params.mesh.incarnation = begin.incarnation();
    params.mesh.epoch = begin.epoch();
    params.mesh.bind_address = options.bind_address;
    params.mesh.advertise_address = options.advertise_address;
    params.mesh.store = own_store.get();
    params.mesh.cancelled = &give_up;
    params.mesh.deadline = deadline;
    params.operation_timeout = operation_timeout;
    over_host = NewTcpCommunicator(params);
  }
  if (!over_host.ok() || !has_device) return over_host;
  NcclCommunicatorParams params;
  params.ep_rank = engine.ep_rank();
  params.ep_size = engine.ep_size();
  params.incarnation = begin.incarnation();
  params.epoch = begin.epoch();
  params.device_index = options.nccl.device_index;
  params.functions = options.nccl.functions;
  params.control = *std::move(over_host);
  params.store = own_store.get();
  params.deadline = deadline;
  params.cancelled = &give_up;
  params.operation_timeout = operation_timeout;
  params.on_stuck_abort = options.nccl.on_stuck_abort;
  return NewNcclCommunicator(std::move(params));
}

absl::Status ExpertRank::Impl::FormEpoch(const v1::EpochBegin& begin,
                                         const v1::JoinResponse& membership) {
  if (begin.incarnation() != membership.incarnation()) {
    return CallError(ErrorReason::kStaleIncarnation, "the epoch is of another incarnation");
  }
  DropEpoch(absl::UnavailableError("another epoch forms"));
  RankEngine& engine = *options.engine;
  absl::StatusOr<std::unique_ptr<Communicator>> communicator = Connect(begin);
  if (!communicator.ok()) return communicator.status();
  const std::lock_guard<std::mutex> lock(epoch_mutex);
  store = nullptr;
  if (last_ended >= begin.epoch()) return last_end;
  engine.EnterEpoch(begin.incarnation(), begin.epoch(), *std::move(communicator));
  epoch = begin.epoch();
  state = v1::RANK_STATE_ACTIVE;
  return absl::OkStatus();
}

void ExpertRank::Impl::AbortEpoch(uint64_t ended, const absl::Status& reason) {
  const std::lock_guard<std::mutex> lock(epoch_mutex);
  last_ended = std::max(last_ended, ended);
  last_end = reason;
  give_up = true;
  if (epoch != 0) state = v1::RANK_STATE_TEARING_DOWN;
  if (store != nullptr) store->Cancel();
  options.engine->Abort(reason);
}

void ExpertRank::Impl::DropEpoch(const absl::Status& reason) {
  {
    const std::lock_guard<std::mutex> lock(epoch_mutex);
    store = nullptr;
    options.engine->Abort(reason);
  }
  {
    // The communicator is broken, so they all end; nobody starts another one meanwhile.
    std::unique_lock<std::mutex> lock(steps_mutex);
    steps_changed.wait(lock, [this] { return num_running_steps == 0; });
  }
  const std::lock_guard<std::mutex> lock(epoch_mutex);
  options.engine->EnterEpoch(0, 0, nullptr);
  epoch = 0;
  state = v1::RANK_STATE_STANDING_BY;
}

grpc::ByteBuffer ExpertRank::Impl::RunStep(ReceivedSlice received, ComputeTurns::Turn turn) {
  const StepHeader header = received.slice.header;
  step = header.step;
  const int64_t hidden_size = received.hidden_size;
  RankEngine& engine = *options.engine;
  received.slice.ep_rank = engine.ep_rank();
  received.slice.ep_size = engine.ep_size();
  absl::StatusOr<RankStepResult> result = absl::UnknownError("");
  const auto known = options.hidden_sizes.find(header.model);
  if (known == options.hidden_sizes.end() || known->second != hidden_size) {
    result = absl::InvalidArgumentError(absl::StrCat("slice.shard: rows of ", hidden_size,
                                                     " elements are none of model ", header.model));
    AbortEpoch(header.epoch, result.status());
  } else {
    TokenShard shard;
    // Without memory for its own tokens the rank does its part for the others': its rows are any.
    const std::vector<std::byte> no_row(
        received.shard_status.ok() ? 0 : hidden_size * DTypeBytes(header.activation_dtype));
    if (!received.shard_status.ok()) {
      shard.rows.assign(received.slice.num_source_tokens, {no_row.data(), 1});
    } else if (received.slice.num_source_tokens > 0) {
      shard.rows.push_back({received.shard.data(), received.slice.num_source_tokens});
    }
    result = engine.RunStep(std::move(received.slice), std::move(shard),
                            SteadyNow() + received.timeout, std::move(turn));
  }
  if (!result.ok()) {
    result = StatusForLink(result.status());
  } else if (!received.shard_status.ok()) {
    result->output_error =
        CallError(ErrorReason::kBuffersExhausted,
                  absl::StrCat("rank ", engine.ep_rank(),
                               " had no memory for its tokens: ", received.shard_status.message()));
  }
  absl::StatusOr<grpc::ByteBuffer> message = EncodeStepResult(header, hidden_size, result);
  if (!message.ok()) {
    result->output_error = message.status();
    message = EncodeStepResult(header, hidden_size, result);
  }
  return *std::move(message);
}

}  // namespace expertmesh
