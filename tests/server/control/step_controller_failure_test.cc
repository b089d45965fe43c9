#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/control/step_controller.h"
#include "tests/server/control/control_fixture.h"

namespace expertmesh {
namespace {

class StepControllerFailureTest : public ControlFixture {
 protected:
  // Steps that hold a row of `poison` get `status`; it may name several calls.
  void FailStepsWith(const std::vector<const TestCall*>& poison, const absl::Status& status) {
    std::vector<std::pair<const std::byte*, const std::byte*>> ranges;
    for (const TestCall* call : poison) ranges.emplace_back(call->hidden_begin, call->hidden_end);
    group.script = [ranges, status, next = std::move(group.script)](const GroupStep& step,
                                                                    int number) {
      for (const TokenShard& shard : step.shards) {
        for (const RowSpan& span : shard.rows) {
          for (const auto& [begin, end] : ranges) {
            if (span.data >= begin && span.data < end) return status;
          }
        }
      }
      return next ? next(step, number) : absl::OkStatus();
    };
  }

  // Numbers of tokens and epochs of all steps from `first` on.
  std::vector<std::pair<int64_t, uint64_t>> Steps(size_t first) const {
    std::vector<std::pair<int64_t, uint64_t>> steps;
    const std::vector<SeenStep> seen = group.seen();
    for (size_t i = first; i < seen.size(); ++i) {
      steps.emplace_back(seen[i].num_tokens, seen[i].header.epoch);
    }
    return steps;
  }
};

TEST_F(StepControllerFailureTest, ALostStepIsReplayedOnTheNextEpoch) {
  group.script = [](const GroupStep&, int number) {
    return number == 1 ? LostStep() : absl::OkStatus();
  };
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall first = MakeCall({.num_tokens = 3});
  TestCall second = MakeCall({.num_tokens = 2});
  Submit(first);
  Submit(second);
  gate.Open();
  ExpectExact(first);
  ExpectExact(second);
  EXPECT_EQ(Steps(0), (std::vector<std::pair<int64_t, uint64_t>>{{1, 1}, {5, 1}, {5, 2}}));
  EXPECT_EQ(first.answer->Wait()->epoch, 2u);
  EXPECT_EQ(controller->Snapshot().steps_lost, 1u);
  ExpectNothingInFlight();
}

TEST_F(StepControllerFailureTest, ThePoisonousCallIsFoundByReplayingOneByOne) {
  Start();
  TestCall good = MakeCall({.num_tokens = 3});
  TestCall poison = MakeCall({.num_tokens = 4});
  TestCall other = MakeCall({.num_tokens = 2});
  FailStepsWith({&poison}, LostStep());
  TestCall blocker = SubmitBlocker();
  for (TestCall* call : {&good, &poison, &other}) Submit(*call);
  gate.Open();
  ExpectExact(good);
  ExpectExact(other);
  EXPECT_EQ(poison.answer->WaitCode(), absl::StatusCode::kInternal);
  EXPECT_EQ(ReasonOf(poison.answer->Wait().status()), ErrorReason::kStepFailed);
  EXPECT_EQ(Steps(1),
            (std::vector<std::pair<int64_t, uint64_t>>{{9, 1}, {9, 2}, {3, 3}, {4, 3}, {2, 4}}));
  ExpectNothingInFlight();
}

TEST_F(StepControllerFailureTest, ATimeOutIsALoss) {
  group.script = [](const GroupStep&, int number) {
    return number == 0 ? absl::DeadlineExceededError("step timeout") : absl::OkStatus();
  };
  Start();
  TestCall call = MakeCall();
  Submit(call);
  ExpectExact(call);
  EXPECT_EQ(Steps(0), (std::vector<std::pair<int64_t, uint64_t>>{{1, 1}, {1, 2}}));
}

TEST_F(StepControllerFailureTest, ASingleCallIsTriedThreeTimes) {
  group.script = [](const GroupStep&, int) { return LostStep(); };
  Start();
  TestCall call = MakeCall({.num_tokens = 2});
  Submit(call);
  EXPECT_EQ(ReasonOf(call.answer->Wait().status()), ErrorReason::kStepFailed);
  EXPECT_EQ(Steps(0), (std::vector<std::pair<int64_t, uint64_t>>{{2, 1}, {2, 2}, {2, 3}}));
}

TEST_F(StepControllerFailureTest, NoStepRunsInALostEpochOrWithoutOne) {
  group.forms_epochs = false;
  group.script = [](const GroupStep&, int number) {
    return number == 0 ? LostStep() : absl::OkStatus();
  };
  Start();
  TestCall call = MakeCall();
  TestCall later = MakeCall({.layer = 4});
  Submit(call);
  while (controller->Snapshot().steps_lost == 0) std::this_thread::yield();
  Submit(later, true);
  controller->NotifyEpochChanged();
  group.SetEpoch(0);
  controller->NotifyEpochChanged();
  group.SetEpoch(9);
  controller->NotifyEpochChanged();
  ExpectExact(call);
  ExpectExact(later);
  EXPECT_EQ(Steps(0), (std::vector<std::pair<int64_t, uint64_t>>{{1, 1}, {1, 9}, {1, 9}}));
  // What was lost goes first.
  EXPECT_EQ(group.seen()[1].header.layer, 1);
}

TEST_F(StepControllerFailureTest, AMissingEpochIsAskedForAgain) {
  group.SetEpoch(0);
  Start();
  TestCall call = MakeCall();
  Submit(call);
  group.SetEpoch(3);
  // Nobody notifies: the worker's own polling finds it.
  while (!call.answer->is_set()) {
    clock.Advance(options.epoch_poll_interval);
    std::this_thread::yield();
  }
  ExpectExact(call);
}

TEST_F(StepControllerFailureTest, ALostInlineStepIsReplayedByTheWorker) {
  group.forms_epochs = false;
  group.script = [](const GroupStep&, int number) {
    return number == 0 ? LostStep() : absl::OkStatus();
  };
  Start();
  TestCall call = MakeCall();
  Submit(call, true);
  EXPECT_FALSE(call.answer->is_set());
  group.SetEpoch(2);
  controller->NotifyEpochChanged();
  ExpectExact(call);
  const std::vector<SeenStep> seen = group.seen();
  EXPECT_EQ(seen[0].thread, std::this_thread::get_id());
  EXPECT_NE(seen[1].thread, std::this_thread::get_id());
}

TEST_F(StepControllerFailureTest, ALossInTheMiddleOfASplitCallKeepsItsOrder) {
  options.max_step_tokens = 3;
  group.script = [](const GroupStep&, int number) {
    return number % 2 == 1 ? LostStep() : absl::OkStatus();
  };
  Start();
  TestCall call = MakeCall({.num_tokens = 11, .topk = 3});
  Submit(call);
  ExpectExact(call);
  ExpectNothingInFlight();
}

// Each loss takes the steps with it that were in flight behind it; pieces of a call are among them.
TEST_F(StepControllerFailureTest, LossesInSeveralLanesKeepTheOrderOfSplitCalls) {
  options.max_step_tokens = 3;
  options.min_lane_pairs_per_expert = 0;
  for (const int32_t lanes : {2, 3, 4}) {
    SCOPED_TRACE("lanes " + std::to_string(lanes));
    options.lanes = group.lanes = lanes;
    const int first = static_cast<int>(group.seen().size());
    // Seldom enough that nobody is lost three times.
    group.script = [first](const GroupStep&, int number) {
      return (number - first) % 11 == 4 ? LostStep() : absl::OkStatus();
    };
    Start();
    const int64_t overlaps_before = group.num_overlaps();
    std::vector<TestCall> calls;
    for (int64_t num_tokens : {11, 1, 20, 7, 3, 15}) {
      calls.push_back(MakeCall({.num_tokens = num_tokens, .topk = 3}));
    }
    for (TestCall& call : calls) Submit(call);
    for (const TestCall& call : calls) ExpectExact(call);
    EXPECT_GT(group.num_overlaps(), overlaps_before);
    EXPECT_GT(controller->Snapshot().steps_lost, 0u);
    ExpectNothingInFlight();
  }
}

// The epoch ends between a step's plan and its start, again and again.
TEST_F(StepControllerFailureTest, AStepThatNoRankWasSentIsNoTry) {
  for (const int32_t num_lanes : {1, 2}) {
    SCOPED_TRACE(num_lanes);
    options.lanes = num_lanes;
    group.lanes = 2;
    std::atomic<int> num_refused{0};
    group.start_script = [&num_refused, this] {
      if (++num_refused > 7) return absl::OkStatus();
      group.SetEpoch(group.epoch() + 1);
      return LostStep();
    };
    Start();
    TestCall call = MakeCall({.num_tokens = 3});
    Submit(call);
    ExpectExact(call);
    EXPECT_EQ(num_refused, 8);
    EXPECT_EQ(controller->Snapshot().steps_lost, 0u);
    ExpectNothingInFlight();
  }
}

TEST_F(StepControllerFailureTest, AStepThatCannotBeSentFailsOnce) {
  group.lanes = options.lanes = 2;
  std::atomic<int> num_refused{0};
  group.start_script = [&num_refused] {
    ++num_refused;
    return CallError(ErrorReason::kMessageTooLarge, "above 2 GiB");
  };
  Start();
  TestCall call = MakeCall({.num_tokens = 3});
  Submit(call);
  EXPECT_EQ(ReasonOf(call.answer->Wait().status()), ErrorReason::kMessageTooLarge);
  EXPECT_EQ(num_refused, 1);
}

TEST_F(StepControllerFailureTest, AnotherErrorOfASharedStepMeetsItsCauseAlone) {
  Start();
  TestCall good = MakeCall({.num_tokens = 3});
  TestCall poison = MakeCall({.num_tokens = 4});
  TestCall other = MakeCall({.num_tokens = 2});
  FailStepsWith({&poison}, absl::InternalError("kernel"));
  TestCall blocker = SubmitBlocker();
  for (TestCall* call : {&good, &poison, &other}) Submit(*call);
  gate.Open();
  ExpectExact(good);
  ExpectExact(other);
  EXPECT_EQ(poison.answer->WaitCode(), absl::StatusCode::kInternal);
  EXPECT_EQ(ReasonOf(poison.answer->Wait().status()), ErrorReason::kStepFailed);
  EXPECT_EQ(Steps(1), (std::vector<std::pair<int64_t, uint64_t>>{{9, 1}, {3, 1}, {4, 1}, {2, 1}}));
  EXPECT_EQ(controller->Snapshot().steps_lost, 0u);
  ExpectNothingInFlight();
}

TEST_F(StepControllerFailureTest, ErrorsOfAStepReachTheCallerAsWhatTheyAre) {
  struct Case {
    absl::Status status;
    absl::StatusCode code;
    ErrorReason reason;
  };
  const std::vector<Case> cases = {
      {absl::ResourceExhaustedError("arena"), absl::StatusCode::kResourceExhausted,
       ErrorReason::kBuffersExhausted},
      {absl::InvalidArgumentError("a defect"), absl::StatusCode::kInternal,
       ErrorReason::kStepFailed},
      {CallError(ErrorReason::kNoSharedExperts, "none"), absl::StatusCode::kFailedPrecondition,
       ErrorReason::kNoSharedExperts},
  };
  group.script = [&cases](const GroupStep&, int number) { return cases[number].status; };
  Start();
  for (const Case& test : cases) {
    SCOPED_TRACE(test.status.ToString());
    TestCall call = MakeCall();
    Submit(call, true);
    EXPECT_EQ(call.answer->WaitCode(), test.code);
    EXPECT_EQ(ReasonOf(call.answer->Wait().status()), test.reason);
  }
}

TEST_F(StepControllerFailureTest, AStrategyThatThePlacementForbidsIsTheCallersError) {
  Start();
  TestCall call = MakeCall();
  call.call->dispatch = DispatchMode::kPassthrough;
  Submit(call);
  EXPECT_EQ(call.answer->WaitCode(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetCallErrorDetails(call.answer->Wait().status())->field, "options.dispatch");
  EXPECT_TRUE(group.seen().empty());
}

TEST_F(StepControllerFailureTest, ALayerThatNoRankHoldsIsInternal) {
  ModelSpec other = model;
  other.name = "other";
  Start();
  TestCall call = MakeCall();
  call.call->model = &other;
  call.call->layer = other.FindLayer(1);
  Submit(call);
  EXPECT_EQ(call.answer->WaitCode(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace expertmesh
