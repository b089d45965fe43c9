#include "server/control/step_controller.h"

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/server/control/control_fixture.h"

namespace expertmesh {
namespace {

class StepControllerTest : public ControlFixture {
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

TEST_F(StepControllerTest, AnswersOnTheWorkerThread) {
  Start();
  TestCall call = MakeCall({.num_tokens = 5});
  Submit(call);
  ExpectExact(call);
  EXPECT_NE(group.seen()[0].thread, std::this_thread::get_id());
  ExpectNothingInFlight();
}

TEST_F(StepControllerTest, ZeroTokensAreAnsweredAtOnceEvenWithoutEpoch) {
  Start();
  group.SetEpoch(0);
  TestCall call = MakeCall({.num_tokens = 0});
  call.call->want_stats = true;
  Submit(call);
  ASSERT_TRUE(call.answer->is_set());
  EXPECT_TRUE(call.answer->Wait()->output.empty());
  EXPECT_EQ(call.answer->Wait()->stats.tokens_per_expert, std::vector<int64_t>(6, 0));
  EXPECT_TRUE(group.seen().empty());
}

TEST_F(StepControllerTest, TokensWithoutExpertsGiveZeros) {
  Start();
  TestCall no_topk = MakeCall({.num_tokens = 3, .topk = 0});
  TestCall no_ids = MakeCall({.num_tokens = 2, .topk = 2, .ids = {-1, -1, -1, -1}});
  Submit(no_topk);
  Submit(no_ids);
  ExpectExact(no_topk);
  ExpectExact(no_ids);
  EXPECT_EQ(no_topk.expected, std::vector<float>(24, 0.0f));
}

TEST_F(StepControllerTest, SmallCallRunsOnTheCallerWhenNothingElseDoes) {
  Start();
  TestCall call = MakeCall({.num_tokens = 3});
  Submit(call, /*may_run_inline=*/true);
  ASSERT_TRUE(call.answer->is_set());
  ExpectExact(call);
  EXPECT_EQ(group.seen()[0].thread, std::this_thread::get_id());
  EXPECT_TRUE(group.seen()[0].on_caller);
  EXPECT_EQ(controller->Snapshot().inline_steps, 1u);
}

TEST_F(StepControllerTest, LargeCallIsQueued) {
  options.max_inline_micros = 250;
  options.cost.micros_per_token = 100;
  Start();
  TestCall small = MakeCall({.num_tokens = 2});
  TestCall large = MakeCall({.num_tokens = 3});
  Submit(small, true);
  Submit(large, true);
  ExpectExact(small);
  ExpectExact(large);
  const std::vector<SeenStep> seen = group.seen();
  EXPECT_EQ(seen[0].thread, std::this_thread::get_id());
  EXPECT_NE(seen[1].thread, std::this_thread::get_id());
  EXPECT_TRUE(seen[0].on_caller);
  EXPECT_FALSE(seen[1].on_caller);
}

TEST_F(StepControllerTest, NothingRunsInlineBesideARunningStep) {
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall call = MakeCall();
  Submit(call, true);
  EXPECT_FALSE(call.answer->is_set());
  gate.Open();
  ExpectExact(call);
  EXPECT_NE(group.seen()[1].thread, std::this_thread::get_id());
}

TEST_F(StepControllerTest, EndOfAnInlineStepWakesTheWorker) {
  Start();
  Gate running;
  group.script = [&](const GroupStep&, int number) {
    if (number == 0) {
      running.Open();
      gate.Wait();
    }
    return absl::OkStatus();
  };
  TestCall inline_call = MakeCall();
  std::thread submitter([&] { Submit(inline_call, true); });
  running.Wait();
  TestCall queued = MakeCall();
  Submit(queued, true);
  gate.Open();
  ExpectExact(queued);
  submitter.join();
  ExpectExact(inline_call);
  EXPECT_NE(group.seen()[0].thread, group.seen()[1].thread);
}

TEST_F(StepControllerTest, WaitingCallsShareAStep) {
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

TEST_F(StepControllerTest, CallsOfDifferentNumericsOrLayersDoNot) {
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

TEST_F(StepControllerTest, LargerCallsAreSplitByTokensAndTheLastPartIsFilled) {
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

TEST_F(StepControllerTest, EveryMaxStepTokensGivesTheSameBytes) {
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

TEST_F(StepControllerTest, SkewedCallsAreSplitByPairsOnOneRank) {
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

TEST_F(StepControllerTest, ATokenAboveThePairLimitRunsAlone) {
  options.max_rank_pairs = 1;
  Start();
  TestCall call = MakeCall({.num_tokens = 3, .topk = 3, .ids = {0, 1, 2, 0, 1, 2, 0, 1, 2}});
  Submit(call, true);
  ExpectExact(call);
  EXPECT_EQ(StepTokens(), (std::vector<int64_t>{1, 1, 1}));
}

TEST_F(StepControllerTest, ALongCallLetsOtherBatchesInBetween) {
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

TEST_F(StepControllerTest, ALongCallLetsSmallOnesOfItsOwnBatchBy) {
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
TEST_F(StepControllerTest, ACallThatFilledAStepUpKeepsItsPlace) {
  options.max_step_tokens = 4;
  Start();
  const std::vector<TestCall> calls =
      QueueBehindBlocker({{.num_tokens = 3}, {.num_tokens = 3}, {.num_tokens = 3}});
  gate.Open();
  for (const TestCall& call : calls) ExpectExact(call);
  EXPECT_EQ(calls[1].answer->Wait()->last_step, 3u);
  EXPECT_EQ(calls[2].answer->Wait()->last_step, 4u);
}

TEST_F(StepControllerTest, RowsStayInTheCallsBuffersAndOutputsInTheArenas) {
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

TEST_F(StepControllerTest, StatsAndTimingsAreTheCallsOwn) {
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall call = MakeCall({.num_tokens = 2, .topk = 3, .ids = {0, 5, 5, -1, 5, 2}});
  TestCall other = MakeCall({.num_tokens = 3});
  call.call->want_stats = true;
  Submit(call);
  Submit(other);
  clock.Advance(absl::Milliseconds(7));
  gate.Open();
  ExpectExact(call);
  const ForwardResult& result = *call.answer->Wait();
  EXPECT_EQ(result.stats.tokens_per_expert, (std::vector<int64_t>{1, 0, 1, 0, 0, 3}));
  EXPECT_EQ(result.stats.step_tokens, 5);
  EXPECT_EQ(result.timings.queue_micros, 7000);
  EXPECT_EQ(result.timings.total_micros, 7000);
  EXPECT_EQ(result.timings.step.compute_micros, 2);
  EXPECT_EQ(result.strategy, DispatchMode::kAllToAll);
  EXPECT_EQ(result.incarnation, 77u);
  EXPECT_EQ(result.epoch, 1u);
  EXPECT_EQ(result.last_step, group.seen()[1].header.step);
  EXPECT_TRUE(other.answer->Wait()->stats.tokens_per_expert.empty());
}

TEST_F(StepControllerTest, TimeInWhichStepsOfACallOverlapCountsOnce) {
  options.max_step_tokens = 4;
  options.lanes = 2;
  group.lanes = 2;
  Start();
  TestCall large = MakeCall({.num_tokens = 8});
  Submit(large);
  ExpectExact(large);
  const ForwardResult& result = *large.answer->Wait();
  EXPECT_EQ(result.stats.num_steps, 2);
  ASSERT_EQ(group.num_overlaps(), 1);
  // A step's own are 1, 2 and 3; of the second one a part was the first one's time.
  const StepTimings& timings = result.timings.step;
  EXPECT_EQ(timings.dispatch_micros, 1);
  EXPECT_GE(timings.compute_micros, 2);
  EXPECT_LT(timings.compute_micros, 4);
  EXPECT_GE(timings.combine_micros, 3);
  EXPECT_LT(timings.combine_micros, 6);
}

TEST_F(StepControllerTest, ASplitCallQueuesUntilItsFirstStepAlone) {
  options.max_step_tokens = 4;
  group.script = [this](const GroupStep&, int number) {
    if (number > 0) clock.Advance(absl::Milliseconds(3));
    return absl::OkStatus();
  };
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall large = MakeCall({.num_tokens = 10});
  Submit(large);
  clock.Advance(absl::Milliseconds(5));
  gate.Open();
  ExpectExact(large);
  const ForwardResult& result = *large.answer->Wait();
  EXPECT_EQ(result.stats.num_steps, 3);
  EXPECT_EQ(result.timings.queue_micros, 5000);
  EXPECT_EQ(result.timings.total_micros, 14'000);
}

TEST_F(StepControllerTest, CallbacksMaySubmitAgainWithoutGrowingTheStack) {
  Start();
  constexpr int kCalls = 20000;
  Answer last;
  int left = kCalls;
  std::function<void(absl::StatusOr<ForwardResult>)> next;
  next = [&](absl::StatusOr<ForwardResult> result) {
    ASSERT_TRUE(result.ok()) << result.status();
    if (--left == 0) {
      last.Set(std::move(result));
      return;
    }
    TestCall call = MakeCall();
    call.call->done = next;
    Submit(call, true);
  };
  next(ForwardResult());
  EXPECT_TRUE(last.Wait().ok());
}

TEST_F(StepControllerTest, ObserverSeesStepsAndCalls) {
  class Recorder : public ControlObserver {
   public:
    void OnStep(const StepRecord& record) override {
      EXPECT_EQ(record.model, "small");
      EXPECT_TRUE(record.status.ok());
      step_tokens += record.num_tokens;
      step_calls += record.num_calls;
      pairs += record.num_pairs;
      compute_micros += record.timings.compute_micros;
    }
    void OnCallDone(const CallRecord& record) override {
      EXPECT_EQ(record.code, absl::StatusCode::kOk);
      ++calls;
      call_tokens += record.num_tokens;
    }
    int64_t step_tokens = 0, step_calls = 0, pairs = 0, compute_micros = 0;
    int64_t calls = 0, call_tokens = 0;
  };
  Recorder recorder;
  controller = std::make_unique<StepController>(options, &group, &routers, &clock, &recorder);
  TestCall first = MakeCall({.num_tokens = 2, .topk = 2, .ids = {0, -1, 1, 2}});
  TestCall second = MakeCall({.num_tokens = 3, .topk = 1, .ids = {0, 0, -1}});
  Submit(first, true);
  Submit(second, true);
  EXPECT_EQ(recorder.step_tokens, 5);
  EXPECT_EQ(recorder.step_calls, 2);
  EXPECT_EQ(recorder.pairs, 5);
  EXPECT_EQ(recorder.compute_micros, 4);
  EXPECT_EQ(recorder.calls, 2);
  EXPECT_EQ(recorder.call_tokens, 5);
  EXPECT_EQ(controller->Snapshot().steps, 2u);
}

}  // namespace
}  // namespace expertmesh
