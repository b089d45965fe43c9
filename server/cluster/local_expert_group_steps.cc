// LocalExpertGroup's steps; what they run on is local_expert_group.cc's.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/cluster/local_expert_group.h"
#include "server/ops/call_error.h"
#include "server/rank/rank_step.h"

namespace expertmesh {
namespace {

int64_t NowMicros() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The error that explains the others: what peers see of a failed rank is only that it aborted.
absl::Status FirstCause(absl::Span<const absl::Status> errors) {
  absl::Status aborted;
  for (const absl::Status& error : errors) {
    if (error.ok()) continue;
    if (!absl::IsAborted(error)) return error;
    aborted.Update(error);
  }
  return CallError(ErrorReason::kStepLost, aborted.message());
}

}  // namespace

absl::StatusOr<GroupStepResult> LocalExpertGroup::RunStep(GroupStep step, bool on_caller,
                                                          absl::Time step_deadline) {
  if (epoch() == 0) {
    return CallError(ErrorReason::kNoEpoch, "the experts are not loaded yet");
  }
  if (step.plan.slices.size() != engines_.size() || step.shards.size() != engines_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("step: ", step.plan.slices.size(),
                                                   " slices and ", step.shards.size(),
                                                   " shards for ", ep_size(), " ranks"));
  }
  for (const StepSlice& slice : step.plan.slices) {
    if (slice.header.incarnation != incarnation_ || slice.header.epoch != epoch()) {
      return CallError(
          ErrorReason::kStepLost,
          absl::StrCat("the step was planned for incarnation ", slice.header.incarnation, " epoch ",
                       slice.header.epoch, "; the group is in ", incarnation_, " epoch ", epoch()));
    }
  }
  absl::StatusOr<GroupStepResult> result =
      step.plan.direct.has_value() ? RunDirect(std::move(step), on_caller, step_deadline)
                                   : RunOnRanks(std::move(step), on_caller, step_deadline);
  if (!result.ok()) {
    const absl::Status device = engines_.front()->backend().device_status();
    if (!device.ok()) {
      // What one rank's thread saw of it may be no more than that another one gave up.
      result = device;
      if (options_.on_device_lost != nullptr) options_.on_device_lost(device);
    }
    FormEpoch();
  }
  return result;
}

absl::StatusOr<GroupStepResult> LocalExpertGroup::RunDirect(GroupStep step, bool on_caller,
                                                            absl::Time deadline) {
  const StepHeader& header = step.plan.slices.front().header;
  const auto hidden_size = hidden_sizes_.find(header.model);
  if (hidden_size == hidden_sizes_.end()) {
    return absl::NotFoundError(absl::StrCat("no rank holds model ", header.model));
  }
  const DType combine_dtype = header.combine_dtype;
  if (absl::Status status = direct_->Scatter(hidden_size->second, step); !status.ok()) {
    return status;
  }
  const DirectSource source = *std::move(step.plan.direct);
  absl::StatusOr<GroupStepResult> partials = RunOnRanks(std::move(step), on_caller, deadline);
  if (!partials.ok()) return partials.status();
  return direct_->Combine(source, combine_dtype, hidden_size->second, *std::move(partials));
}

absl::StatusOr<GroupStepResult> LocalExpertGroup::RunOnRanks(GroupStep step, bool on_caller,
                                                             absl::Time deadline) {
  // With one rank there is no one to run beside the caller, who waits anyway.
  return on_caller || ep_size() == 1 ? RunOnCaller(std::move(step), deadline)
                                     : RunOnRankThreads(std::move(step), deadline);
}

absl::StatusOr<GroupStepResult> LocalExpertGroup::RunOnCaller(GroupStep step, absl::Time deadline) {
  const int64_t begun = NowMicros();
  std::vector<std::unique_ptr<RankStep>> steps;
  steps.reserve(engines_.size());
  for (size_t rank = 0; rank < engines_.size(); ++rank) {
    absl::StatusOr<std::unique_ptr<RankStep>> rank_step =
        engines_[rank]->Begin(std::move(step.plan.slices[rank]), std::move(step.shards[rank]));
    if (!rank_step.ok()) return rank_step.status();
    steps.push_back(*std::move(rank_step));
  }
  const int64_t dispatched = NowMicros();
  for (const std::unique_ptr<RankStep>& rank_step : steps) {
    if (absl::Status status = rank_step->Compute(); !status.ok()) return status;
  }
  GroupStepResult result;
  result.shards.reserve(steps.size());
  std::vector<absl::Status> errors;
  for (size_t rank = 0; rank < steps.size(); ++rank) {
    absl::StatusOr<RankStepResult> rank_result = steps[rank]->Finish(deadline);
    if (!rank_result.ok()) {
      errors.push_back(rank_result.status());
      continue;
    }
    usage_.CountStep(static_cast<int32_t>(rank), *rank_result);
    result.shards.push_back(std::move(rank_result->output));
    result.timings.compute_micros += rank_result->timings.compute_micros;
  }
  if (!errors.empty()) return FirstCause(errors);
  // The ranks took turns, so their times add up instead of overlapping.
  const int64_t took = NowMicros() - begun;
  const int64_t compute = std::min(result.timings.compute_micros, took);
  // What was computed while rows were on their way is no dispatch.
  const int64_t dispatch = std::min(dispatched - begun, took - compute);
  result.timings = {dispatch, compute, took - compute - dispatch};
  return result;
}

absl::StatusOr<GroupStepResult> LocalExpertGroup::RunOnRankThreads(GroupStep step,
                                                                   absl::Time deadline) {
  std::vector<absl::StatusOr<RankStepResult>> rank_results(engines_.size());
  std::mutex mutex;
  std::condition_variable all_done;
  size_t num_running = engines_.size();
  for (size_t rank = 0; rank < engines_.size(); ++rank) {
    clients_[rank]->RunStep(std::move(step.plan.slices[rank]), std::move(step.shards[rank]),
                            deadline, [&, rank](absl::StatusOr<RankStepResult> rank_result) {
                              const std::lock_guard<std::mutex> lock(mutex);
                              rank_results[rank] = std::move(rank_result);
                              if (--num_running == 0) all_done.notify_one();
                            });
  }
  {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [&] { return num_running == 0; });
  }

  GroupStepResult result;
  std::vector<absl::Status> errors;
  for (size_t rank = 0; rank < rank_results.size(); ++rank) {
    absl::StatusOr<RankStepResult>& rank_result = rank_results[rank];
    if (!rank_result.ok()) {
      errors.push_back(rank_result.status());
      continue;
    }
    const StepTimings& timings = rank_result->timings;
    usage_.CountStep(static_cast<int32_t>(rank), *rank_result);
    result.shards.push_back(std::move(rank_result->output));
    // Each stage's maximum would count twice what overlaps: one rank computes while another waits
    // for its partials.
    if (timings.compute_micros >= result.timings.compute_micros) result.timings = timings;
  }
  if (!errors.empty()) return FirstCause(errors);
  return result;
}

}  // namespace expertmesh
