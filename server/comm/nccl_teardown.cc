#include "server/comm/nccl_teardown.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/steady_now.h"
#include "server/ops/rank_text.h"
#include "server/ops/start_thread.h"

namespace expertmesh {
namespace {

using Result = NcclFunctions::Result;

// For the last bytes of a rank that leaves in peace.
constexpr absl::Duration kFinalizeTimeout = absl::Seconds(2);
constexpr absl::Duration kEndTimeout = absl::Seconds(4);
constexpr std::chrono::microseconds kFinalizePollInterval(200);
// A shorter one says nothing: threads take that long to wake.
constexpr absl::Duration kLeastTimeout = absl::Milliseconds(1);

std::chrono::nanoseconds ToChrono(absl::Duration duration) {
  return absl::ToChronoNanoseconds(std::clamp(duration, absl::ZeroDuration(), absl::Hours(1000)));
}

}  // namespace

NcclTeardown::NcclTeardown(Params params)
    : params_(std::move(params)),
      operation_timeout_(ToChrono(std::max(params_.operation_timeout, kLeastTimeout))) {}

NcclTeardown::~NcclTeardown() = default;

absl::Status NcclTeardown::Begin() {
  absl::StatusOr<std::unique_ptr<DeadlineWorker>> worker = DeadlineWorker::Start();
  if (!worker.ok()) return worker.status();
  worker_ = *std::move(worker);
  absl::StatusOr<std::thread> thread = StartThread([this] { Run(); });
  if (!thread.ok()) return thread.status();
  thread_ = *std::move(thread);
  return absl::OkStatus();
}

absl::Status NcclTeardown::broken() const {
  const Lock lock(mutex_);
  return broken_;
}

void NcclTeardown::Break(const absl::Status& status, const absl::Status& reason_for_peers) {
  const Lock lock(mutex_);
  BreakLocked(status, reason_for_peers);
}

void NcclTeardown::BreakLocked(const absl::Status& status, const absl::Status& reason_for_peers) {
  if (!broken_.ok()) return;
  broken_ = status;
  reason_for_peers_ = reason_for_peers;
  changed_.notify_all();
}

void NcclTeardown::WaitUntilTornDown() {
  Lock lock(mutex_);
  changed_.wait(lock, [this] { return torn_down_; });
}

absl::Status NcclTeardown::Call(absl::FunctionRef<absl::Status()> call) {
  {
    const Lock lock(mutex_);
    if (!broken_.ok()) return broken_;
    in_call_ = true;
    call_begun_ = Clock::now();
  }
  const absl::Status status = call();
  const Lock lock(mutex_);
  in_call_ = false;
  if (!broken_.ok()) changed_.notify_all();
  return status;
}

// Nobody is notified: the thread looks at the clock once in operation_timeout, and no deadline is
// nearer than that when it is set.
void NcclTeardown::Watch(std::shared_ptr<const NcclOperation> operation) {
  const Lock lock(mutex_);
  watched_ = std::move(operation);
  watched_deadline_ = Clock::now() + operation_timeout_;
}

void NcclTeardown::WatchGiving(std::shared_ptr<const NcclOperation> operation) {
  const Lock lock(mutex_);
  const Clock::time_point now = Clock::now();
  if (given_ != nullptr) watched_deadline_ += now - given_begun_;
  given_ = std::move(operation);
  given_begun_ = now;
}

NcclTeardown::Clock::time_point NcclTeardown::CheckDeadlines(Clock::time_point now) {
  Clock::time_point next = now + operation_timeout_;
  if (in_call_) next = std::min(next, call_begun_ + operation_timeout_);
  if (given_ != nullptr) {
    next = std::min(next, given_begun_ + operation_timeout_);
  } else if (watched_ != nullptr) {
    next = std::min(next, watched_deadline_);
  }
  if (next > now) {
    if (given_ == nullptr || watched_ == nullptr) return next;
    // What is left to that one when the giving is over.
    const auto left = std::max<Clock::duration>(watched_deadline_ - given_begun_,
                                                absl::ToChronoNanoseconds(kLeastTimeout));
    return std::min(next, now + left);
  }
  std::string message =
      given_ != nullptr ? absl::StrCat("rank ", params_.ep_rank, ": NCCL has not taken ",
                                       given_->ToString(), " in time")
                        : absl::StrCat("rank ", params_.ep_rank, " waited in vain for the end of ",
                                       watched_ == nullptr ? "a call" : watched_->ToString());
  if (in_call_) {
    absl::StrAppend(&message, "; it is in a call of NCCL or the device since ",
                    absl::FormatDuration(absl::FromChrono(now - call_begun_)));
  }
  const absl::Status status = absl::DeadlineExceededError(message);
  BreakLocked(status, status);
  return next;
}

void NcclTeardown::Run() {
  absl::Status reason_for_peers;
  {
    Lock lock(mutex_);
    while (broken_.ok()) {
      const Clock::time_point next = CheckDeadlines(Clock::now());
      if (broken_.ok()) changed_.wait_until(lock, next);
    }
    if (torn_down_) return;
    reason_for_peers = reason_for_peers_;
  }
  TearDown(reason_for_peers);
}

bool NcclTeardown::WaitForCall(Clock::time_point deadline) {
  Lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return !in_call_; });
}

void NcclTeardown::TearDown(const absl::Status& reason_for_peers) {
  params_.on_broken();
  if (absl::IsDataLoss(reason_for_peers)) {
    // An abort would be an ABORTED to them; a call without counts is refused on all ranks.
    static_cast<void>(params_.control->AllGatherV({}, *NewInlineHostStream()));
  } else if (!reason_for_peers.ok()) {
    params_.control->Abort(reason_for_peers);
  }
  // A call that does not come back may be what the abort ends.
  Clock::time_point call_begun;
  {
    const Lock lock(mutex_);
    call_begun = call_begun_;
  }
  static_cast<void>(WaitForCall(call_begun + ToChrono(params_.abort_timeout / 2)));
  const bool is_aborted = worker_->Run(
      [functions = params_.functions, comm = params_.comm, stream = params_.stream,
       device_index = params_.device_index] {
        // Nobody is left to hear of an error; what matters is that it is over.
        static_cast<void>(functions->SetDevice(device_index));
        static_cast<void>(functions->CommAbort(comm));
        static_cast<void>(functions->StreamSynchronize(stream));
      },
      params_.abort_timeout);
  const bool is_over = is_aborted && WaitForCall(Clock::now() + ToChrono(params_.abort_timeout));
  absl::Status broken;
  bool end_hangs;
  {
    const Lock lock(mutex_);
    broken = broken_;
    end_hangs = end_hangs_;
    left_behind_ = !is_over;
  }
  if (!is_over) {
    const char* const call = is_aborted  ? "a call of NCCL or the device"
                             : end_hangs ? "ncclCommFinalize or ncclCommDestroy"
                                         : "ncclCommAbort";
    const absl::Duration timeout = end_hangs ? kEndTimeout : params_.abort_timeout;
    params_.on_stuck_abort(absl::DeadlineExceededError(
        RankText(params_.ep_rank,
                 absl::StrCat("is stuck: ", call, " did not return within ",
                              absl::FormatDuration(timeout), " after"),
                 broken)));
  }
  params_.on_torn_down(broken);
  const Lock lock(mutex_);
  torn_down_ = true;
  changed_.notify_all();
}

bool NcclTeardown::EndInPeace() {
  const auto is_over = std::make_shared<std::atomic<bool>>(false);
  const absl::Time deadline = SteadyNow() + kFinalizeTimeout;
  const bool returned = worker_->Run(
      [is_over, deadline, functions = params_.functions, comm = params_.comm,
       device_index = params_.device_index] {
        if (!functions->SetDevice(device_index).ok()) return;
        Result result = functions->CommFinalize(comm);
        while (result == Result::kInProgress && SteadyNow() < deadline) {
          std::this_thread::sleep_for(kFinalizePollInterval);
          if (functions->CommGetAsyncError(comm, &result) != Result::kSuccess) return;
        }
        if (result == Result::kSuccess) {
          is_over->store(functions->CommDestroy(comm) == Result::kSuccess);
        }
      },
      kEndTimeout);
  {
    const Lock lock(mutex_);
    end_hangs_ = !returned;
  }
  return returned && is_over->load();
}

bool NcclTeardown::Stop(bool in_peace) {
  const absl::Status left =
      absl::UnavailableError(absl::StrCat("rank ", params_.ep_rank, " has left"));
  if (in_peace && thread_.joinable() && broken().ok() && EndInPeace()) {
    const Lock lock(mutex_);
    broken_ = left;
    torn_down_ = true;
    changed_.notify_all();
  } else {
    Break(left, left);
  }
  if (thread_.joinable()) {
    thread_.join();
  } else {
    // Without threads there is none to wait for it from.
    static_cast<void>(params_.functions->CommAbort(params_.comm));
  }
  const Lock lock(mutex_);
  if (!left_behind_) params_.functions->StreamDestroy(params_.stream);
  return !left_behind_;
}

}  // namespace expertmesh
