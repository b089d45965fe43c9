// An expert server's epochs and steps, on the threads of a session.

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/steady_now.h"
#include "server/cluster/remote_rank.h"
#include "server/comm/in_process_communicator.h"
#include "server/comm/nccl_communicator.h"
#include "server/comm/tcp_communicator.h"
#include "server/ops/call_error.h"
#include "server/ops/logging.h"
#include "server/ops/rank_text.h"
#include "server/rpc/epoch_end_wire.h"
#include "server/rpc/expert_rank_impl.h"
#include "server/rpc/forward_encoder.h"
#include "server/rpc/status_mapping.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kLongTeardown = absl::Seconds(1);

// Codes that say all by themselves cross the link; a rank that was aborted by its peers says so.
absl::Status StatusForLink(const absl::Status& status) {
  if (!absl::IsAborted(status)) return status;
  return CallError(ErrorReason::kStepLost, status.message());
}

}  // namespace

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
      CheckDevice();
      LogWarning("cannot form an epoch", {{"epoch", begin.epoch()}, {"why", status.message()}});
    } else {
      LogInfo("in an epoch", {{"epoch", begin.epoch()},
                              {"ranks", options.engine->ep_size()},
                              {"exchange", options.engine->ep_size() == 1      ? "none"
                                           : options.nccl.functions != nullptr ? "NCCL"
                                                                               : "TCP"}});
    }
    answer.mutable_epoch_ready()->set_epoch(begin.epoch());
    if (!status.ok()) *answer.mutable_epoch_ready()->mutable_status() = ToRpcStatus(status);
  } else if (command.has_epoch_end()) {
    const uint64_t ended = command.epoch_end().epoch();
    const EpochEnd end = EpochEndFromWire(command.epoch_end());
    if (epoch == ended) {
      Log(end.is_wanted() ? LogLevel::kInfo : LogLevel::kWarning, "its epoch ended",
          {{"epoch", ended}, {"why", end.reason.message()}});
    }
    const absl::Time begun = SteadyNow();
    DropEpoch(end.reason);
    if (const absl::Duration took = SteadyNow() - begun; took > kLongTeardown) {
      LogWarning("took long to drop its epoch, in what ended its communicator or its steps",
                 {{"epoch", ended}, {"took", absl::FormatDuration(took)}});
    }
    answer.mutable_epoch_down()->set_epoch(ended);
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
  params.allocator = engine.backend().device_allocator().get();
  params.deadline = deadline + kDeviceConnectTimeout;
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
  absl::Status ended;
  {
    const std::lock_guard<std::mutex> lock(epoch_mutex);
    store = nullptr;
    const bool has_ended = last_ended >= begin.epoch();
    if (communicator.ok() && !has_ended) {
      engine.EnterEpoch(begin.incarnation(), begin.epoch(), *std::move(communicator));
      epoch = begin.epoch();
      state = v1::RANK_STATE_ACTIVE;
      return absl::OkStatus();
    }
    // Why it was given up, rather than that it was.
    ended = has_ended && (communicator.ok() || absl::IsCancelled(communicator.status()))
                ? last_end
                : communicator.status();
  }
  // An end in peace would wait for peers that may be gone.
  if (communicator.ok()) (*communicator)->Abort(ended);
  return ended;
}

void ExpertRank::Impl::CheckDevice() const {
  if (options.on_device_lost == nullptr) return;
  const absl::Status status = options.engine->backend().device_status();
  if (!status.ok()) options.on_device_lost(status);
}

void ExpertRank::Impl::AbortEpoch(uint64_t ended, const absl::Status& reason) {
  const std::lock_guard<std::mutex> lock(epoch_mutex);
  last_ended = std::max(last_ended, ended);
  last_end = reason;
  give_up = true;
  if (epoch != 0) state = v1::RANK_STATE_TEARING_DOWN;
  if (store != nullptr) store->Cancel();
  options.engine->Break(reason);
}

void ExpertRank::Impl::DropEpoch(const absl::Status& reason) {
  {
    const std::lock_guard<std::mutex> lock(epoch_mutex);
    store = nullptr;
  }
  // Without the mutex, which AbortEpoch takes on gRPC's thread: this waits until no buffer is
  // touched any more. Only this function and FormEpoch, on the same thread, change the engine's
  // epoch.
  options.engine->Abort(reason);
  {
    // The communicator is broken, so they all end; nobody starts another one meanwhile.
    std::unique_lock<std::mutex> lock(steps_mutex);
    steps_changed.wait(lock, [this] { return num_running_steps == 0; });
  }
  std::unique_ptr<Communicator> left;  // ends after the mutex is free again
  const std::lock_guard<std::mutex> lock(epoch_mutex);
  left = options.engine->EnterEpoch(0, 0, nullptr);
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
    // Whom a peer has aborted has nothing to add.
    if (!absl::IsAborted(result.status())) {
      LogWarning(
          "a step failed here",
          {{"epoch", header.epoch}, {"step", header.step}, {"why", result.status().message()}});
    }
    CheckDevice();
    result = StatusForLink(result.status());
  } else if (!received.shard_status.ok()) {
    result->output_error = CallError(ErrorReason::kBuffersExhausted,
                                     RankText(engine.ep_rank(), "had no memory for its tokens",
                                              received.shard_status.message()));
  }
  absl::StatusOr<grpc::ByteBuffer> message = EncodeStepResult(header, hidden_size, result);
  if (!message.ok()) {
    result->output_error = message.status();
    message = EncodeStepResult(header, hidden_size, result);
  }
  return *std::move(message);
}

}  // namespace expertmesh
