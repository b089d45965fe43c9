// RemoteExpertGroup's steps over all ranks; who these are is remote_expert_group.cc's.

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/cluster/remote_expert_group.h"
#include "server/ops/call_error.h"
#include "server/ops/logging.h"

namespace expertmesh {

class RemoteExpertGroup::Flight : public StepInFlight {
 public:
  Flight(RemoteExpertGroup* group, std::shared_ptr<RunningStep> run, const StepHeader& header,
         absl::Time deadline)
      : group_(group), run_(std::move(run)), header_(header), deadline_(deadline) {}

  // The step is the control plane's own to sum.
  void SetDirect(std::shared_ptr<DirectStep> direct, DirectSource source, int64_t hidden_size) {
    direct_ = std::move(direct);
    source_ = std::move(source);
    hidden_size_ = hidden_size;
  }

  bool is_decided() const override { return run_->is_decided(); }

  absl::StatusOr<GroupStepResult> Finish() override {
    absl::StatusOr<GroupStepResult> result = group_->FinishOnRanks(run_, header_, deadline_);
    if (!result.ok() || !source_.has_value()) return result;
    return direct_->Combine(*source_, header_.combine_dtype, hidden_size_, *std::move(result));
  }

 private:
  RemoteExpertGroup* const group_;
  const std::shared_ptr<RunningStep> run_;
  const StepHeader header_;
  const absl::Time deadline_;
  std::shared_ptr<DirectStep> direct_;
  std::optional<DirectSource> source_;
  int64_t hidden_size_ = 0;
};

absl::StatusOr<GroupStepResult> RemoteExpertGroup::RunStep(GroupStep step, bool /*on_caller*/,
                                                           absl::Time step_deadline) {
  absl::StatusOr<std::unique_ptr<StepInFlight>> flight =
      StartStep(std::move(step), /*has_follower=*/false, step_deadline, nullptr);
  if (!flight.ok()) return flight.status();
  return (*flight)->Finish();
}

absl::StatusOr<std::unique_ptr<StepInFlight>> RemoteExpertGroup::StartStep(
    GroupStep step, bool has_follower, absl::Time step_deadline,
    absl::AnyInvocable<void()> on_decided) {
  if (static_cast<int64_t>(step.plan.slices.size()) != ep_size() ||
      static_cast<int64_t>(step.shards.size()) != ep_size()) {
    return absl::InvalidArgumentError(absl::StrCat("step: ", step.plan.slices.size(),
                                                   " slices and ", step.shards.size(),
                                                   " shards for ", ep_size(), " ranks"));
  }
  const StepHeader header = step.plan.slices.front().header;
  int64_t hidden_size = 0;
  std::shared_ptr<DirectStep> direct;
  std::optional<DirectSource> source;
  if (step.plan.direct.has_value()) {
    const auto found = hidden_sizes_.find(header.model);
    if (found == hidden_sizes_.end()) {
      return absl::NotFoundError(absl::StrCat("no rank holds model ", header.model));
    }
    hidden_size = found->second;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      direct = direct_;
    }
    if (absl::Status status = direct->Scatter(hidden_size, step); !status.ok()) return status;
    source = *std::move(step.plan.direct);
  }
  absl::StatusOr<std::shared_ptr<RunningStep>> run =
      StartOnRanks(std::move(step), has_follower, step_deadline, std::move(on_decided));
  if (!run.ok()) return run.status();
  auto flight = std::make_unique<Flight>(this, *std::move(run), header, step_deadline);
  if (source.has_value()) flight->SetDirect(std::move(direct), *std::move(source), hidden_size);
  return flight;
}

absl::StatusOr<std::shared_ptr<RunningStep>> RemoteExpertGroup::StartOnRanks(
    GroupStep step, bool has_follower, absl::Time step_deadline,
    absl::AnyInvocable<void()> on_decided) {
  std::vector<std::shared_ptr<RemoteRank>> ranks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranks = ranks_;
  }
  for (int32_t rank = 0; rank < ep_size(); ++rank) {
    if (ranks[rank] == nullptr) continue;  // then there is no epoch
    const absl::Status status = ranks[rank]->CheckStep(step.plan.slices[rank], step.shards[rank]);
    if (!status.ok()) return status;
  }
  auto run = std::make_shared<RunningStep>(ep_size(), std::move(on_decided));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const StepSlice& slice : step.plan.slices) {
      if (slice.header.incarnation != incarnation_ || slice.header.epoch != membership_.epoch() ||
          slice.header.epoch == 0) {
        return CallError(
            ErrorReason::kStepLost,
            absl::StrCat("the step was planned for incarnation ", slice.header.incarnation,
                         " epoch ", slice.header.epoch, "; the group is in ", incarnation_,
                         " epoch ", membership_.epoch()));
      }
    }
    running_.push_back(run);
    ranks = ranks_;
  }
  const CollectiveOrder::Places places =
      order_.StartStep(step.plan.slices.front().header.epoch, has_follower);
  for (int32_t rank = 0; rank < ep_size(); ++rank) {
    StepSlice& slice = step.plan.slices[rank];
    slice.header.dispatch_order = places.dispatch;
    slice.header.combine_order = places.combine;
    ranks[rank]->RunStep(std::move(slice), std::move(step.shards[rank]), step_deadline,
                         [run, rank](absl::StatusOr<RankStepResult> result) {
                           run->OnDone(rank, std::move(result));
                         });
  }
  return run;
}

absl::StatusOr<GroupStepResult> RemoteExpertGroup::FinishOnRanks(
    const std::shared_ptr<RunningStep>& run, const StepHeader& header, absl::Time step_deadline) {
  absl::StatusOr<std::vector<RankStepResult>> parts = run->Wait(*clock_, step_deadline);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase(running_, run);
  }
  if (!parts.ok()) {
    EndEpoch(header.epoch, parts.status());
    return parts.status();
  }
  GroupStepResult result;
  absl::Status output_error;
  for (int32_t rank = 0; rank < ep_size(); ++rank) {
    RankStepResult& part = (*parts)[rank];
    usage_.CountStep(rank, part);
    if (!part.output_error.ok()) {
      LogWarning("a step's output was lost", {{"ep_rank", rank},
                                              {"step", absl::StrCat(header.step)},
                                              {"why", part.output_error.message()}});
      output_error.Update(part.output_error);
    }
    const StepTimings& timings = part.timings;
    if (timings.compute_micros >= result.timings.compute_micros) result.timings = timings;
    result.shards.push_back(std::move(part.output));
  }
  // All ranks are through with the step: it fails alone, whatever code a rank gives. These two say
  // that the epoch has ended (ExpertGroup::RunStep), and whoever believes it waits for the next.
  if (absl::IsUnavailable(output_error) || absl::IsDeadlineExceeded(output_error)) {
    return absl::InternalError(
        absl::StrCat("a rank lost its output of the step: ",
                     output_error.ToString(absl::StatusToStringMode::kWithNoExtraData)));
  }
  if (!output_error.ok()) return output_error;
  return result;
}

void RemoteExpertGroup::SkipFollower() {
  const std::optional<int64_t> place = order_.SkipFollower();
  if (!place.has_value()) return;
  std::vector<std::shared_ptr<RemoteRank>> ranks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (order_.epoch() != membership_.epoch()) return;
    ranks = ranks_;
  }
  for (const std::shared_ptr<RemoteRank>& rank : ranks) {
    rank->SkipOrder(incarnation_, order_.epoch(), *place);
  }
}

}  // namespace expertmesh
