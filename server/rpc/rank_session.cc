#include "server/rpc/rank_session.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/ops/call_error.h"
#include "server/rpc/epoch_end_wire.h"
#include "server/rpc/forward_encoder.h"
#include "server/rpc/status_mapping.h"

namespace expertmesh {
namespace {

constexpr char kMethod[] = "/expertmesh.v1.RankService/RunSteps";
constexpr std::chrono::milliseconds kTimeToLeave(500);

// What gRPC says of a stream that broke names neither what broke nor who says so.
absl::Status StreamEnd(const absl::Status& status) {
  if (status.ok()) return absl::UnavailableError("the control plane ended the stream");
  if (GetCallErrorDetails(status).has_value()) return status;
  return absl::UnavailableError(
      absl::StrCat("the stream to the control plane broke: ", status.ToString()));
}

}  // namespace

std::shared_ptr<RankSession> RankSession::Start(grpc::GenericStub* stub, Allocator* allocator,
                                                const v1::StreamHello& hello,
                                                OnEpochEnd on_epoch_end) {
  std::shared_ptr<RankSession> session(new RankSession(allocator, std::move(on_epoch_end)));
  session->self_ = session;
  stub->PrepareBidiStreamingCall(session->context_.get(), kMethod, grpc::StubOptions(),
                                 session.get());
  session->AddHold();  // for writes that are started outside of reactions
  session->StartRead(&session->read_);
  session->StartCall();
  v1::RunStepsRequest request;
  *request.mutable_hello() = hello;
  session->Write(EncodeSmallMessage(request));
  return session;
}

absl::StatusOr<ReceivedCommand> RankSession::Next() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !commands_.empty() || !end_.ok(); });
  // What came before the end is of no use any more.
  if (!end_.ok()) return end_;
  ReceivedCommand command = std::move(commands_.front());
  commands_.pop_front();
  return command;
}

void RankSession::Write(grpc::ByteBuffer message) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_ || !end_.ok()) return;
    to_write_.push_back(std::move(message));
  }
  Pump();
}

void RankSession::Pump() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (pumping_) return;
  pumping_ = true;
  while (!writing_ && !closing_ && !to_write_.empty()) {
    writing_ = true;
    // gRPC reads the message until OnWriteDone.
    const grpc::ByteBuffer* message = &to_write_.front();
    lock.unlock();
    StartWrite(message);
    lock.lock();
  }
  pumping_ = false;
  const bool lets_go = closing_ && !std::exchange(has_let_go_, true);
  lock.unlock();
  if (lets_go) RemoveHold();
}

void RankSession::CloseWrites() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  Pump();
}

void RankSession::OnWriteDone(bool ok) {
  std::deque<grpc::ByteBuffer> sent;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    sent.push_back(std::move(to_write_.front()));
    to_write_.pop_front();
  }
  sent.clear();
  if (!ok) return CloseWrites();  // reads end as well
  Pump();
}

void RankSession::OnReadDone(bool ok) {
  // The stream's status follows with OnDone, which comes only once nobody may write any more.
  if (!ok) return CloseWrites();
  absl::StatusOr<ReceivedCommand> command = DecodeCommand(&read_, allocator_);
  read_.Clear();
  if (!command.ok()) {
    Fail(command.status());
    TryCancel();
    return;
  }
  if (command->other.has_epoch_end()) {
    const v1::EpochEnd& end = command->other.epoch_end();
    on_epoch_end_(end.epoch(), EpochEndFromWire(end).reason);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    commands_.push_back(*std::move(command));
    changed_.notify_all();
  }
  StartRead(&read_);
}

void RankSession::Fail(const absl::Status& status) {
  on_epoch_end_(kAllEpochs, status);
  const std::lock_guard<std::mutex> lock(mutex_);
  end_.Update(status);
  changed_.notify_all();
}

void RankSession::Leave() {
  v1::RunStepsRequest request;
  request.mutable_leave();
  Write(EncodeSmallMessage(request));
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, kTimeToLeave, [this] { return !end_.ok(); });
  }
  Cancel(absl::CancelledError("the rank was told to stop"));
}

void RankSession::Cancel(const absl::Status& reason) {
  Fail(reason);
  TryCancel();
}

void RankSession::TryCancel() {
  const std::lock_guard<std::mutex> lock(context_mutex_);
  if (context_ != nullptr) context_->TryCancel();
}

void RankSession::Finish() {
  TryCancel();
  CloseWrites();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  // Here: the last reference may go on gRPC's thread once the allocator is gone.
  commands_.clear();
}

void RankSession::OnDone(const grpc::Status& status) {
  const std::shared_ptr<RankSession> self = std::move(self_);
  Fail(StreamEnd(FromGrpcStatus(status)));
  {
    // Before anybody learns of the end, who may drop the channel next.
    const std::lock_guard<std::mutex> lock(context_mutex_);
    context_.reset();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  changed_.notify_all();
}

}  // namespace expertmesh
