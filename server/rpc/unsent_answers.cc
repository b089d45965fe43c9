#include "server/rpc/unsent_answers.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/server_context.h"
#include "server/ops/call_error.h"

namespace expertmesh {

void CallCanceller::Cancel() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (context_ != nullptr) context_->TryCancel();
}

void CallCanceller::Forget() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  context_ = nullptr;
}

absl::Status UnsentAnswers::Reserve(int64_t bytes, absl::Time deadline,
                                    const std::shared_ptr<CallCanceller>& canceller) {
  std::vector<std::shared_ptr<CallCanceller>> overdue;
  int64_t held;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    held = held_bytes_;
    if (held == 0 || bytes <= max_bytes_ - held) {
      held_bytes_ += bytes;
      entries_.emplace(canceller, Entry{bytes, deadline});
      return absl::OkStatus();
    }
    const absl::Time now = absl::Now();
    for (const auto& [other, entry] : entries_) {
      if (entry.deadline <= now) overdue.push_back(other);
    }
  }
  for (const auto& other : overdue) other->Cancel();
  return CallError(ErrorReason::kBuffersExhausted,
                   absl::StrCat("no room for the answer: ", held, " of ", max_bytes_,
                                " bytes are held by answers that are not made or not read yet"));
}

void UnsentAnswers::StartSending(const std::shared_ptr<CallCanceller>& canceller) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_.find(canceller)->second;
  const absl::Duration time_to_read =
      kLeastTimeToRead + absl::Seconds(static_cast<double>(entry.bytes) / kSlowestBytesPerSecond);
  entry.deadline = std::min(entry.deadline, absl::Now() + time_to_read);
}

void UnsentAnswers::Release(const std::shared_ptr<CallCanceller>& canceller) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(canceller);
  held_bytes_ -= found->second.bytes;
  entries_.erase(found);
}

int64_t UnsentAnswers::held_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_bytes_;
}

}  // namespace expertmesh
