// Which calls, and which parts of one, share a step.
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/control/step_controller.h"
#include "tests/server/control/control_fixture.h"

namespace expertmesh {
namespace {

class StepControllerBatchingTest : public ControlFixture {
 protected:
  // One step after the blocker's that runs `shapes` together, or so the test hopes.
  std::vector<TestCall> QueueBehindBlocker(const std::vector<CallShape>& shapes) {
    SubmitBlocker();
    std::vector<TestCall> calls;
    for (const CallShape& shape : shapes) {
      calls.push_back(MakeCall(shape));
      Submit(calls.back());
    }
    return calls;
  }

  std::vector<int64_t> StepTokens() const {
    std::vector<int64_t> tokens;
    for (const SeenStep& step : group.seen()) tokens.push_back(step.num_tokens);
    return tokens;
  }
};

TEST_F(StepControllerBatchingTest, WaitingCallsShareAStep) {
  Start();
  const std::vector<TestCall> calls = QueueBehindBlocker({{.num_tokens = 1},
                                                          {.num_tokens = 4, .topk = 5},
                                                          {.num_tokens = 2, .topk = 0},
                                                          {.num_tokens = 3, .topk = 1}});
  EXPECT_EQ(controller->Snapshot().queued_calls, 4);
  EXPECT_EQ(controller->Snapshot().queued_tokens, 10);
  clock.Advance(absl::Seconds(3));
  EXPECT_EQ(controller->Snapshot().oldest_queued_age, absl::Seconds(3));
  gate.Open();
  for (const TestCall& call : calls) ExpectExact(call);
  EXPECT_EQ(StepTokens(), (std::vector<int64_t>{1, 10}));
  EXPECT_EQ(group.seen()[1].shard_tokens, (std::vector<int64_t>{5, 5}));
  EXPECT_EQ(controller->Snapshot().oldest_queued_age, absl::ZeroDuration());
  ExpectNothingInFlight();
}

TEST_F(StepControllerBatchingTest, CallsOfDifferentNumericsOrLayersDoNot) {
  Start();
  TestCall blocker = SubmitBlocker();
  std::vector<TestCall> calls;
  for (int i = 0; i < 7; ++i) calls.push_back(MakeCall({.layer = i == 1 ? 4 : 1}));
  calls[2].call->combine = CombineMode::kPerExpert;
  calls[3].call->dispatch = DispatchMode::kAllToAll;
  calls[4].call->apply_router_weight_on_input = true;
  calls[5].call->combine_dtype = DType::kBFloat16;
  calls[6].call->include_shared_experts = true;
  for (TestCall& call : calls) Submit(call);
  gate.Open();
  for (const TestCall& call : calls) EXPECT_TRUE(call.answer->Wait().ok());
  const std::vector<SeenStep> seen = group.seen();
  ASSERT_EQ(seen.size(), 8u);
  EXPECT_EQ(seen[2].header.layer, 4);
  EXPECT_EQ(seen[3].header.combine, CombineMode::kPerExpert);
  EXPECT_EQ(seen[4].header.strategy, DispatchMode::kAllToAll);
  EXPECT_TRUE(seen[5].header.apply_router_weight_on_input);
  EXPECT_EQ(seen[6].header.combine_dtype, DType::kBFloat16);
  EXPECT_FALSE(seen[6].header.include_shared_experts);
  EXPECT_TRUE(seen[7].header.include_shared_experts);
  for (size_t i = 1; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].header.step, seen[i - 1].header.step + 1);
  }
}

TEST_F(StepControllerBatchingTest, LargerCallsAreSplitByTokensAndTheLastPartIsFilled) {
  options.max_step_tokens = 4;
  Start();
  const std::vector<TestCall> calls =
      QueueBehindBlocker({{.num_tokens = 10}, {.num_tokens = 1}, {.num_tokens = 2}});
  gate.Open();
  for (const TestCall& call : calls) ExpectExact(call);
  EXPECT_EQ(StepTokens(), (std::vector<int64_t>{1, 4, 4, 4, 1}));
  EXPECT_EQ(calls[0].answer->Wait()->stats.num_steps, 4);
  EXPECT_EQ(calls[0].answer->Wait()->stats.step_tokens, 13);
  EXPECT_EQ(calls[2].answer->Wait()->stats.num_steps, 1);
  ExpectNothingInFlight();
}

TEST_F(StepControllerBatchingTest, EveryMaxStepTokensGivesTheSameBytes) {
  for (int64_t max_step_tokens = 1; max_step_tokens <= 9; ++max_step_tokens) {
    SCOPED_TRACE(max_step_tokens);
    options.max_step_tokens = max_step_tokens;
    Start();
    TestCall call = MakeCall({.num_tokens = 8, .topk = 3});
    TestCall inline_call = MakeCall({.num_tokens = 8, .topk = 3});
    Submit(call);
    ExpectExact(call);
    Submit(inline_call, true);
    ExpectExact(inline_call);
  }
}

TEST_F(StepControllerBatchingTest, SkewedCallsAreSplitByPairsOnOneRank) {
  options.max_rank_pairs = 6;
  Start();
  // Experts 0 to 2 live on rank 0.
  const std::vector<TestCall> calls = QueueBehindBlocker({
      {.num_tokens = 5, .topk = 2, .ids = {0, 1, 0, 2, 1, 2, 0, 1, 2, 0}},
      {.num_tokens = 3, .topk = 2, .ids = {3, 4, 5, 0, 3, 4}},
  });
  gate.Open();
  for (const TestCall& call : calls) ExpectExact(call);
  EXPECT_EQ(StepTokens(), (std::vector<int64_t>{1, 3, 5}));
  for (const SeenStep& step : group.seen()) EXPECT_LE(step.max_rank_pairs, 6);
}

TEST_F(StepControllerBatchingTest, ATokenAboveThePairLimitRunsAlone) {
  options.max_rank_pairs = 1;
  Start();
  TestCall call = MakeCall({.num_tokens = 3, .topk = 3, .ids = {0, 1, 2, 0, 1, 2, 0, 1, 2}});
  Submit(call, true);
  ExpectExact(call);
  EXPECT_EQ(StepTokens(), (std::vector<int64_t>{1, 1, 1}));
}

TEST_F(StepControllerBatchingTest, ALongCallLetsOtherBatchesInBetween) {
  options.max_step_tokens = 2;
  group.script = [this](const GroupStep&, int) {
    clock.Advance(absl::Milliseconds(1));
    return absl::OkStatus();
  };
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall large = MakeCall({.num_tokens = 6});
  TestCall other = MakeCall({.num_tokens = 3, .layer = 4});
  Submit(large);
  clock.Advance(absl::Milliseconds(1));
  Submit(other);
  clock.Advance(absl::Milliseconds(1));
  gate.Open();
  ExpectExact(large);
  ExpectExact(other);
  std::vector<int32_t> layers;
  for (const SeenStep& step : group.seen()) layers.push_back(step.header.layer);
  EXPECT_EQ(layers, (std::vector<int32_t>{1, 1, 4, 1, 4, 1}));
}

TEST_F(StepControllerBatchingTest, ALongCallLetsSmallOnesOfItsOwnBatchBy) {
  options.max_step_tokens = 4;
  Start();
  const std::vector<TestCall> calls =
      QueueBehindBlocker({{.num_tokens = 80}, {.num_tokens = 1}, {.num_tokens = 2}});
  gate.Open();
  for (const TestCall& call : calls) ExpectExact(call);
  // The small ones wait for one step of the long call, not for all twenty.
  EXPECT_EQ(calls[1].answer->Wait()->last_step, 3u);
  EXPECT_EQ(calls[2].answer->Wait()->last_step, 3u);
  EXPECT_EQ(StepTokens(), std::vector<int64_t>(
                              {1, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3}));
  ExpectNothingInFlight();
}

// What only filled a step up has its turn next, or each step of a long queue would send a call
// back.
TEST_F(StepControllerBatchingTest, ACallThatFilledAStepUpKeepsItsPlace) {
  options.max_step_tokens = 4;
  Start();
  const std::vector<TestCall> calls =
      QueueBehindBlocker({{.num_tokens = 3}, {.num_tokens = 3}, {.num_tokens = 3}});
  gate.Open();
  for (const TestCall& call : calls) ExpectExact(call);
  EXPECT_EQ(calls[1].answer->Wait()->last_step, 3u);
  EXPECT_EQ(calls[2].answer->Wait()->last_step, 4u);
}

TEST_F(StepControllerBatchingTest, RowsStayInTheCallsBuffersAndOutputsInTheArenas) {
  Start();
  std::vector<TestCall> calls = QueueBehindBlocker({{.num_tokens = 5}, {.num_tokens = 2}});
  gate.Open();
  for (const TestCall& call : calls) ExpectExact(call);
  const std::vector<SeenStep> seen = group.seen();
  const int64_t row_bytes = model.hidden_size * 4;
  int64_t num_rows = 0;
  for (const RowSpan& span : seen[1].rows) {
    bool inside = false;
    for (const TestCall& call : calls) {
      inside = inside || (span.data >= call.hidden_begin &&
                          span.data + span.num_rows * row_bytes <= call.hidden_end);
    }
    EXPECT_TRUE(inside);
    num_rows += span.num_rows;
  }
  EXPECT_EQ(num_rows, 7);
  // Shards of 4 and 3 tokens: the first call's output lies in two arenas, the second's in one, and
  // both calls share that.
  const ForwardResult& first = *calls[0].answer->Wait();
  const ForwardResult& second = *calls[1].answer->Wait();
  ASSERT_EQ(first.output.size(), 2u);
  ASSERT_EQ(second.output.size(), 1u);
  EXPECT_EQ(first.output[0].size_bytes, 4 * row_bytes);
  EXPECT_EQ(second.output[0].data, first.output[1].data + row_bytes);
  EXPECT_EQ(second.output[0].owner, first.output[1].owner);
}

}  // namespace
}  // namespace expertmesh
