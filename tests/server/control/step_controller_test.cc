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

using StepControllerTest = ControlFixture;

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
