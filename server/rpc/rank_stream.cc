#include "server/rpc/rank_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "expertmesh/v1/rank.pb.h"
#include "kernels/base/steady_now.h"
#include "kernels/base/step_arena.h"
#include "server/ops/call_error.h"
#include "server/ops/rank_text.h"
#include "server/rpc/epoch_end_wire.h"
#include "server/rpc/forward_encoder.h"
#include "server/rpc/grpc_deadline.h"
#include "server/rpc/status_mapping.h"

namespace expertmesh {
namespace {

// A result's rows as an arena, which outputs are held by.
struct ReceivedRows {
  ReceivedRows(std::shared_ptr<Allocator> memory, Buffer received)
      : allocator(std::move(memory)), rows(std::move(received)), arena(allocator.get()) {}
  const std::shared_ptr<Allocator> allocator;
  const Buffer rows;
  StepArena arena;
};

// What rows that gRPC still has to send are held by: their call's memory, and where it goes back.
struct HeldRows {
  std::shared_ptr<Allocator> allocator;
  std::shared_ptr<const void> owner;
};

constexpr absl::Duration kTimeToRead = absl::Milliseconds(500);
// All that is known of a peer that went without a word.
constexpr char kGone[] = "its stream ended (its process or its connection is gone, or it gave up)";

}  // namespace

RankStream::RankStream(RemoteExpertGroup* group, const std::map<std::string, int64_t>* hidden_sizes,
                       grpc::CallbackServerContext* context)
    : group_(group), hidden_sizes_(hidden_sizes), context_(context) {}

RankStream* RankStream::Start(RemoteExpertGroup* group,
                              const std::map<std::string, int64_t>* hidden_sizes,
                              grpc::CallbackServerContext* context, absl::Status peer_error) {
  auto stream = std::shared_ptr<RankStream>(new RankStream(group, hidden_sizes, context));
  stream->self_ = stream;
  if (peer_error.ok()) {
    stream->Read();
  } else {
    stream->End(peer_error);
  }
  return stream.get();
}

absl::Status RankStream::CheckStep(const StepSlice& slice, const TokenShard& shard) const {
  const auto hidden_size = hidden_sizes_->find(slice.header.model);
  if (hidden_size == hidden_sizes_->end()) {
    return absl::NotFoundError(absl::StrCat("no model ", slice.header.model));
  }
  return CheckFitsWire(slice, shard, hidden_size->second);
}

void RankStream::RunStep(StepSlice slice, TokenShard shard, absl::Time deadline, StepDone done) {
  const auto hidden_size = hidden_sizes_->find(slice.header.model);
  if (hidden_size == hidden_sizes_->end()) {
    return done(absl::NotFoundError(absl::StrCat("no model ", slice.header.model)));
  }
  shard.owners.resize(shard.rows.size());
  for (std::shared_ptr<const void>& owner : shard.owners) {
    if (owner == nullptr) continue;
    owner = std::make_shared<HeldRows>(HeldRows{group_->allocator(), std::move(owner)});
  }
  absl::StatusOr<grpc::ByteBuffer> message =
      EncodeSlice(slice, shard, hidden_size->second, deadline - SteadyNow());
  if (!message.ok()) return done(message.status());
  absl::Status error;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_.has_value()) {
      error = CallError(ErrorReason::kStepLost, RankText(ep_rank(), "is gone", end_->message()));
    } else {
      PendingStep& pending = pending_[slice.header.step];
      pending.header = slice.header;
      pending.num_rows = slice.num_output_rows();
      pending.hidden_size = hidden_size->second;
      pending.done = std::move(done);
      to_write_.push_back(*std::move(message));
    }
  }
  if (!error.ok()) return done(std::move(error));
  Pump();
}

void RankStream::Abort(const absl::Status& reason) {
  std::map<uint64_t, PendingStep> pending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pending.swap(pending_);
  }
  for (auto& [step, aborted] : pending) aborted.done(absl::AbortedError(reason.message()));
}

void RankStream::EnterEpoch(uint64_t incarnation, uint64_t epoch, absl::Duration form_timeout,
                            absl::Duration operation_timeout) {
  v1::RunStepsResponse command;
  v1::EpochBegin& begin = *command.mutable_epoch_begin();
  begin.set_incarnation(incarnation);
  begin.set_epoch(epoch);
  begin.set_timeout_micros(absl::ToInt64Microseconds(form_timeout));
  begin.set_operation_timeout_micros(absl::ToInt64Microseconds(operation_timeout));
  Write(EncodeSmallMessage(command));
}

void RankStream::EndEpoch(uint64_t epoch, const EpochEnd& end) {
  v1::RunStepsResponse command;
  *command.mutable_epoch_end() = EpochEndToWire(epoch, end);
  Write(EncodeSmallMessage(command));
}

void RankStream::SkipOrder(uint64_t incarnation, uint64_t epoch, int64_t order) {
  v1::RunStepsResponse command;
  v1::OrderSkip& skip = *command.mutable_order_skip();
  skip.set_incarnation(incarnation);
  skip.set_epoch(epoch);
  skip.set_order(order);
  Write(EncodeSmallMessage(command));
}

void RankStream::Close(const absl::Status& reason) { End(reason); }

void RankStream::Write(grpc::ByteBuffer message) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_.has_value()) return;
    to_write_.push_back(std::move(message));
  }
  Pump();
}

void RankStream::Pump() {
  const std::shared_ptr<RankStream> self = shared_from_this();
  std::unique_lock<std::mutex> lock(mutex_);
  if (pumping_) return;
  pumping_ = true;
  while (!finished_) {
    if (end_.has_value() && writing_ && !waits_to_cut_) {
      // What is on its way comes first, so that the peer hears of the reason.
      waits_to_cut_ = true;
      lock.unlock();
      cut_.Set(ToGrpcDeadline(kTimeToRead), [weak = weak_from_this()](bool is_due) {
        const std::shared_ptr<RankStream> stream = weak.lock();
        if (is_due && stream != nullptr) stream->Cut();
      });
    } else if (writing_ && must_cut_ && !cancelled_) {
      // A peer that does not read would keep the message, and with it the stream, for ever.
      cancelled_ = true;
      lock.unlock();
      context_->TryCancel();
    } else if (wants_read_ && !end_.has_value()) {
      // Here, as gRPC allows none once Finish was called.
      wants_read_ = false;
      lock.unlock();
      StartRead(&read_);
    } else if (writing_ || (!end_.has_value() && to_write_.empty())) {
      break;
    } else if (end_.has_value()) {
      finished_ = true;
      const grpc::Status status = ToGrpcStatus(*end_);
      lock.unlock();
      Finish(status);
    } else {
      writing_ = true;
      // gRPC reads the message until OnWriteDone.
      const grpc::ByteBuffer* message = &to_write_.front();
      lock.unlock();
      StartWrite(message);
    }
    lock.lock();
  }
  pumping_ = false;
}

void RankStream::Cut() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    must_cut_ = true;
  }
  Pump();
}

void RankStream::OnWriteDone(bool ok) {
  std::deque<grpc::ByteBuffer> sent;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    sent.push_back(std::move(to_write_.front()));
    to_write_.pop_front();
  }
  sent.clear();
  if (!ok) End(absl::UnavailableError(kGone));
  Pump();
}

void RankStream::OnReadDone(bool ok) {
  if (!ok) return End(absl::UnavailableError(kGone));
  absl::StatusOr<ReceivedEvent> event = DecodeEvent(&read_, group_->request_allocator());
  read_.Clear();
  absl::Status status = event.status();
  if (status.ok()) status = Handle(*std::move(event));
  if (!status.ok()) return End(status);
  // Only now, so that what the rank says is heard in its order.
  Read();
}

void RankStream::Read() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    wants_read_ = true;
  }
  Pump();
}

absl::Status RankStream::Handle(ReceivedEvent event) {
  if (event.result.has_value()) return HandleResult(*std::move(event.result));
  const v1::RunStepsRequest::EventCase kind = event.other.event_case();
  if ((kind == v1::RunStepsRequest::kHello) != (member_id_ == 0)) {
    return CallError(ErrorReason::kMalformedMessage,
                     "a rank's stream begins with its hello, and only begins so");
  }
  switch (kind) {
    case v1::RunStepsRequest::kHello: {
      const v1::StreamHello& hello = event.other.hello();
      ep_rank_ = hello.ep_rank();
      absl::Status status =
          group_->Attach(hello.incarnation(), hello.member_id(), shared_from_this());
      if (!status.ok()) return status;
      member_id_ = hello.member_id();
      bool ended;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        ended = end_.has_value();
      }
      // Whoever ended it did not know the member yet.
      if (ended) group_->OnStreamEnded(member_id_, absl::UnavailableError(kGone));
      return absl::OkStatus();
    }
    case v1::RunStepsRequest::kEpochReady:
      group_->OnEpochReady(member_id_, event.other.epoch_ready().epoch(),
                           FromRpcStatus(event.other.epoch_ready().status()));
      return absl::OkStatus();
    case v1::RunStepsRequest::kLeave:
      // Which ends the stream.
      group_->OnLeave(member_id_);
      return absl::OkStatus();
    case v1::RunStepsRequest::kEpochDown:
      group_->OnEpochDown(member_id_, event.other.epoch_down().epoch());
      return absl::OkStatus();
    default:
      return CallError(ErrorReason::kMalformedMessage, "a rank's message says nothing");
  }
}

absl::Status RankStream::HandleResult(ReceivedResult result) {
  PendingStep pending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pending_.find(result.step);
    // Of a step that was given up.
    if (found == pending_.end() || found->second.header.epoch != result.epoch ||
        found->second.header.incarnation != result.incarnation) {
      return absl::OkStatus();
    }
    pending = std::move(found->second);
    pending_.erase(found);
  }
  if (!result.status.ok() && !result.ran_to_end) {
    pending.done(result.status);
    return absl::OkStatus();
  }
  RankStepResult output;
  output.timings = result.timings;
  output.num_expert_rows = result.num_expert_rows;
  output.traffic = std::move(result.traffic);
  if (!result.status.ok()) {
    output.output_error = result.status;
    pending.done(std::move(output));
    return absl::OkStatus();
  }
  if (result.num_rows != pending.num_rows || result.hidden_size != pending.hidden_size ||
      result.dtype != pending.header.output_dtype) {
    const absl::Status error = absl::InternalError(
        absl::StrCat("rank ", ep_rank(), " gave ", result.num_rows, " x ", result.hidden_size,
                     " output elements for ", pending.num_rows, " x ", pending.hidden_size));
    pending.done(error);
    return error;
  }
  const auto rows = std::make_shared<ReceivedRows>(group_->allocator(), std::move(result.output));
  output.output.num_rows = result.num_rows;
  output.output.rows = rows->rows.data();
  output.output.arena = std::shared_ptr<StepArena>(rows, &rows->arena);
  pending.done(std::move(output));
  return absl::OkStatus();
}

void RankStream::OnCancel() { End(absl::UnavailableError(kGone)); }

void RankStream::End(const absl::Status& reason) {
  std::map<uint64_t, PendingStep> pending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (end_.has_value()) return;
    end_ = reason;
    pending.swap(pending_);
  }
  const absl::Status lost =
      CallError(ErrorReason::kStepLost, RankText(ep_rank(), "is gone", reason.message()));
  for (auto& [step, given_up] : pending) given_up.done(lost);
  if (const uint64_t member_id = member_id_; member_id != 0) {
    group_->OnStreamEnded(member_id, reason);
  }
  Pump();
}

void RankStream::OnDone() {
  // Whoever is about to leave Pump has a reference of its own.
  const std::shared_ptr<RankStream> self = std::move(self_);
}

}  // namespace expertmesh
