#include "server/rpc/unsent_answers.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/server_context.h"
#include "kernels/base/steady_now.h"
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

absl::StatusOr<UnsentAnswers::Id> UnsentAnswers::Reserve(
    int64_t bytes, absl::Time deadline, const std::shared_ptr<CallCanceller>& canceller) {
  std::vector<std::shared_ptr<CallCanceller>> overdue;
  int64_t held;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    held = held_bytes_;
    if (held == 0 || bytes <= max_bytes_ - held) {
      held_bytes_ += bytes;
      gauge_.Add(static_cast<double>(bytes));
      entries_.emplace(++last_id_, Entry{bytes, deadline, canceller});
      return last_id_;
    }
    const absl::Time now = SteadyNow();
    for (const auto& [id, entry] : entries_) {
      if (entry.deadline <= now) overdue.push_back(entry.canceller);
    }
  }
  for (const auto& other : overdue) other->Cancel();
  return CallError(ErrorReason::kBuffersExhausted,
                   absl::StrCat("no room for the answer: ", held, " of ", max_bytes_,
                                " bytes are held by answers that are not made or not read yet"));
}

void UnsentAnswers::StartSending(Id id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_.find(id)->second;
  const absl::Duration time_to_read =
      kLeastTimeToRead + absl::Seconds(static_cast<double>(entry.bytes) / kSlowestBytesPerSecond);
  entry.deadline = std::min(entry.deadline, SteadyNow() + time_to_read);
}

void UnsentAnswers::Release(Id id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(id);
  held_bytes_ -= found->second.bytes;
  gauge_.Add(-static_cast<double>(found->second.bytes));
  entries_.erase(found);
}

int64_t UnsentAnswers::held_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_bytes_;
}

}  // namespace expertmesh
