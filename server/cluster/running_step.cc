#include "server/cluster/running_step.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/ops/call_error.h"
#include "server/ops/few_of.h"
#include "server/ops/rank_text.h"

namespace expertmesh {
namespace {

// What a rank reports when a peer, not itself, is to blame.
bool IsPeersFault(const absl::Status& status) {
  return absl::IsAborted(status) || absl::IsUnavailable(status);
}

}  // namespace

void RunningStep::OnDone(int32_t ep_rank, absl::StatusOr<RankStepResult> result) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!result.ok()) {
    absl::Status& error = IsPeersFault(result.status()) ? peers_error_ : own_error_;
    error.Update(
        absl::Status(result.status().code(), RankText(ep_rank, result.status().message())));
  }
  results_[ep_rank] = std::move(result);
  has_answered_[ep_rank] = true;
  --num_missing_;
  Decide();
}

void RunningStep::OnLost(const absl::Status& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  lost_.Update(reason);
  Decide();
}

void RunningStep::Decide() {
  if (num_missing_ > 0 && lost_.ok() && own_error_.ok()) return;
  if (is_decided_.exchange(true, std::memory_order_acq_rel)) return;
  changed_.notify_all();
  if (on_decided_ != nullptr) on_decided_();
}

std::string RunningStep::LateText() const {
  std::vector<std::string> late;
  for (size_t rank = 0; rank < has_answered_.size(); ++rank) {
    if (!has_answered_[rank]) late.push_back(absl::StrCat(rank));
  }
  return absl::StrCat(late.size() == 1 ? "rank " : "ranks ", FewOf(late), " did not end ",
                      late.size() == 1 ? "its" : "their", " part of the step in time",
                      peers_error_.ok() ? "" : "; ", peers_error_.message());
}

absl::StatusOr<std::vector<RankStepResult>> RunningStep::Wait(Clock& clock, absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_decided() && clock.Now() < deadline) clock.WaitUntil(changed_, lock, deadline);
  on_decided_ = nullptr;
  if (!own_error_.ok()) return own_error_;
  if (!lost_.ok()) return lost_;
  if (num_missing_ > 0) {
    return absl::DeadlineExceededError(LateText());
  }
  if (!peers_error_.ok()) return CallError(ErrorReason::kStepLost, peers_error_.message());
  std::vector<RankStepResult> results;
  results.reserve(results_.size());
  for (absl::StatusOr<RankStepResult>& result : results_) results.push_back(*std::move(result));
  return results;
}

}  // namespace expertmesh
