// StepController's steps that overlap; the rest is in step_controller.cc.

#include <utility>
#include <vector>

#include "server/control/lane_deadline.h"
#include "server/control/step_controller.h"

namespace expertmesh {

// A step in flight.
struct StepController::Lane {
  StepBatch batch;
  StepRecord record;
  StepRunner::StartedStep started;
  absl::Time deadline;
};

bool StepController::IsWorthALane(const BatchKey& beside) const {
  const BatchQueue::Outlook next = queue_.LookAhead(options_.max_step_tokens);
  if (next.is_repeat) return false;
  return *next.key != beside || next.num_tokens >= options_.max_step_tokens ||
         next.num_pairs >= options_.min_lane_pairs_per_expert * beside.layer->num_experts;
}

bool StepController::MayStartLane(const std::deque<Lane>& lanes, bool is_follower_promised) const {
  if (stopping_ || queue_.empty() || !EpochReady()) return false;
  if (lanes.empty()) return true;
  if (static_cast<int32_t>(lanes.size()) >= num_lanes_) return false;
  const Lane& last = lanes.back();
  // What is repeated runs alone; a step of a lost epoch ends first.
  if (last.batch.attempt > 0 || last.started.header.epoch != group_->epoch()) return false;
  if (is_follower_promised) return !queue_.LookAhead(options_.max_step_tokens).is_repeat;
  return IsWorthALane(last.batch.pieces[0].call->key);
}

void StepController::RunLanes() {
  std::deque<Lane> lanes;
  bool is_follower_promised = false;
  std::unique_lock<std::mutex> lock(mutex_);
  in_lanes_ = true;
  while (true) {
    if (MayStartLane(lanes, is_follower_promised)) {
      Aftermath after;
      StepBatch batch = TakeBatch(clock_->Now(), after);
      lock.unlock();
      Deliver(after);
      StartLane(std::move(batch), lanes, is_follower_promised);
      lock.lock();
      num_lanes_in_flight_ = static_cast<int32_t>(lanes.size());
      continue;
    }
    if (is_follower_promised && static_cast<int32_t>(lanes.size()) < num_lanes_) {
      is_follower_promised = false;
      lock.unlock();
      group_->SkipFollower();
      lock.lock();
      continue;
    }
    if (lanes.empty()) break;
    const Lane& oldest = lanes.front();
    if (!oldest.started.flight->is_decided() && clock_->Now() < oldest.deadline) {
      has_free_lane_ = static_cast<int32_t>(lanes.size()) < num_lanes_;
      clock_->WaitUntil(worker_cv_, lock, oldest.deadline);
      has_free_lane_ = false;
      continue;
    }
    lock.unlock();
    FinishOldestLane(lanes, is_follower_promised);
    lock.lock();
  }
  in_lanes_ = false;
  running_ = false;
}

void StepController::StartLane(StepBatch batch, std::deque<Lane>& lanes,
                               bool& is_follower_promised) {
  const absl::Time begun = clock_->Now();
  Aftermath after;
  Lane lane;
  PrepareBatch(batch, lane.record, after);
  if (batch.pieces.empty()) return Deliver(after);
  Describe(batch, begun, lane.record);
  bool has_follower = false;
  if (batch.attempt == 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    has_follower = !stopping_ && !queue_.empty() && IsWorthALane(batch.pieces[0].call->key);
  }
  lane.deadline =
      LaneDeadline(begun, static_cast<int64_t>(lanes.size()),
                   lanes.empty() ? begun : lanes.back().deadline, options_.step_timeout);
  const StepOutcome outcome = runner_.Start(
      batch, has_follower, lane.deadline,
      [this] {
        { std::lock_guard<std::mutex> lock(mutex_); }
        worker_cv_.notify_one();
      },
      lane.record, lane.started);
  if (outcome.status.ok()) {
    is_follower_promised = has_follower;
    lane.batch = std::move(batch);
    lanes.push_back(std::move(lane));
    return Deliver(after);
  }
  if (observer_ != nullptr) observer_->OnStep(lane.record);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++counters_.steps;
    FinishStep(batch, outcome, after);
  }
  Deliver(after);
}

void StepController::FinishOldestLane(std::deque<Lane>& lanes, bool& is_follower_promised) {
  std::vector<std::pair<Lane, StepOutcome>> ended;
  bool all_well = true;
  do {
    Lane lane = std::move(lanes.front());
    lanes.pop_front();
    StepOutcome outcome =
        runner_.Finish(lane.batch, std::move(lane.started), all_well, lane.record);
    if (observer_ != nullptr) observer_->OnStep(lane.record);
    all_well = all_well && outcome.status.ok();
    ended.emplace_back(std::move(lane), std::move(outcome));
    if (!all_well && std::exchange(is_follower_promised, false)) group_->SkipFollower();
  } while (!all_well && !lanes.empty());
  Aftermath after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.steps += ended.size();
    num_lanes_in_flight_ = static_cast<int32_t>(lanes.size());
    // Each goes before what is in the queue, so the last one first.
    for (auto step = ended.rbegin(); step != ended.rend(); ++step) {
      FinishStep(step->first.batch, step->second, after);
    }
  }
  Deliver(after);
}

}  // namespace expertmesh
