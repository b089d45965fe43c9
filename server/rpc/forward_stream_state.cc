#include "server/rpc/forward_stream_state.h"

#include <cassert>
#include <utility>

namespace expertmesh {

void ForwardStreamState::Charge(ForwardStreamMessage* message, int64_t bytes) {
  const int64_t change = bytes - message->charged_bytes;
  message->charged_bytes = bytes;
  charged_bytes_ += change;
  total_->Add(change);
}

bool ForwardStreamState::MayRead() const {
  if (reading_ || reads_done_ || ended_) return false;
  return charged_bytes_ == 0 || (charged_bytes_ < max_bytes_ && !total_->spent());
}

ForwardStreamState::Action ForwardStreamState::Next() {
  if (finished_) return Action::kNone;
  // Before a read: an answer frees what a read may need.
  if (writing_ == nullptr && !answers_.empty()) {
    writing_ = std::move(answers_.front());
    answers_.pop_front();
    waiting_bytes_ -= writing_->charged_bytes;
    in_flight_.erase(writing_->stream_seq);
    return Action::kWrite;
  }
  if (MayRead()) {
    reading_ = true;
    return Action::kRead;
  }
  if ((reads_done_ || ended_) && num_running_ == 0 && writing_ == nullptr) {
    finished_ = true;
    return Action::kFinish;
  }
  return Action::kNone;
}

void ForwardStreamState::OnReadDone(bool ok) {
  assert(reading_);
  reading_ = false;
  if (!ok) reads_done_ = true;
}

bool ForwardStreamState::Admit(const MessagePtr& message, int64_t bytes) {
  if (ended() || !in_flight_.try_emplace(message->stream_seq, Entry{message}).second) return false;
  ++num_running_;
  Charge(message.get(), bytes + kMessageOverheadBytes);
  return true;
}

ForwardStreamState::MessagePtr ForwardStreamState::FindRunning(uint64_t stream_seq) const {
  const auto found = in_flight_.find(stream_seq);
  return found == in_flight_.end() || found->second.answered ? nullptr : found->second.message;
}

void ForwardStreamState::ExpectAnswer(ForwardStreamMessage* message, int64_t answer_bytes) {
  Charge(message, message->charged_bytes + answer_bytes);
}

bool ForwardStreamState::ShouldCopyAnswer() const {
  return answers_.size() >= kMaxSharedAnswers || waiting_bytes_ >= kMaxSharedAnswerBytes;
}

bool ForwardStreamState::OnAnswer(const MessagePtr& message, int64_t answer_bytes) {
  assert(num_running_ > 0);
  --num_running_;
  if (ended_) {
    Charge(message.get(), 0);
    return false;
  }
  Charge(message.get(), answer_bytes + kMessageOverheadBytes);
  in_flight_.find(message->stream_seq)->second.answered = true;
  waiting_bytes_ += message->charged_bytes;
  answers_.push_back(message);
  return true;
}

ForwardStreamState::MessagePtr ForwardStreamState::OnWriteDone() {
  assert(writing_ != nullptr);
  written_any_ = true;
  Charge(writing_.get(), 0);
  return std::exchange(writing_, nullptr);
}

void ForwardStreamState::EndWhenAnswered(absl::Status status) {
  if (ended()) return;
  reads_done_ = true;
  final_status_ = std::move(status);
}

ForwardStreamState::Ended ForwardStreamState::End(absl::Status status) {
  Ended result;
  if (ended()) return result;
  ended_ = true;
  final_status_ = std::move(status);
  for (auto& [seq, entry] : in_flight_) {
    if (!entry.answered) result.running.push_back(std::move(entry.message));
  }
  in_flight_.clear();
  for (const MessagePtr& message : answers_) Charge(message.get(), 0);
  result.dropped = std::move(answers_);
  answers_.clear();
  waiting_bytes_ = 0;
  return result;
}

}  // namespace expertmesh
