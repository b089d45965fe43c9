#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/control/step_controller.h"
#include "tests/server/control/control_fixture.h"

namespace expertmesh {
namespace {

class StepControllerLifecycleTest : public ControlFixture {
 protected:
  TestCall MakeCallFor(absl::Duration time, const CallShape& shape = {}) {
    TestCall call = MakeCall(shape);
    call.call->deadline = clock.Now() + time;
    return call;
  }
};

// ---- Deadlines ----

TEST_F(StepControllerLifecycleTest, AQueuedCallExpiresWhileAStepRuns) {
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall late = MakeCallFor(absl::Milliseconds(10));
  TestCall patient = MakeCallFor(absl::Milliseconds(20));
  Submit(late);
  Submit(patient);
  clock.Advance(absl::Milliseconds(9));
  EXPECT_FALSE(late.answer->is_set());
  clock.Advance(absl::Milliseconds(1));
  EXPECT_EQ(late.answer->WaitCode(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonOf(late.answer->Wait().status()), ErrorReason::kDeadlinePassed);
  EXPECT_FALSE(blocker.answer->is_set());
  EXPECT_EQ(controller->Snapshot().queued_calls, 1);
  gate.Open();
  ExpectExact(patient);
  EXPECT_EQ(group.seen()[1].num_tokens, 1);
  ExpectNothingInFlight();
}

TEST_F(StepControllerLifecycleTest, AnEarlierDeadlineThatComesLaterIsKept) {
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall patient = MakeCallFor(absl::Seconds(100));
  TestCall hasty = MakeCallFor(absl::Milliseconds(1));
  Submit(patient);
  Submit(hasty);
  clock.Advance(absl::Milliseconds(1));
  EXPECT_EQ(hasty.answer->WaitCode(), absl::StatusCode::kDeadlineExceeded);
  clock.Advance(absl::Seconds(100));
  EXPECT_EQ(patient.answer->WaitCode(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(StepControllerLifecycleTest, ADeadlineDropsTheResultAndNotTheStep) {
  Start();
  Gate running;
  Gate second_gate;
  group.script = [&](const GroupStep&, int number) {
    if (number == 1) {
      running.Open();
      second_gate.Wait();
    }
    return absl::OkStatus();
  };
  TestCall late = MakeCallFor(absl::Milliseconds(10), {.num_tokens = 4});
  TestCall patient = MakeCall({.num_tokens = 2});
  TestCall blocker = SubmitBlocker();
  Submit(late);
  Submit(patient);
  gate.Open();
  running.Wait();
  clock.Advance(absl::Milliseconds(10));
  EXPECT_EQ(late.answer->WaitCode(), absl::StatusCode::kDeadlineExceeded);
  // The step still reads its rows.
  EXPECT_EQ(controller->Snapshot().tokens_in_flight, 6);
  second_gate.Open();
  ExpectExact(patient);
  EXPECT_EQ(group.seen().size(), 2u);
  ExpectNothingInFlight();
}

TEST_F(StepControllerLifecycleTest, ACallThatComesTooLateIsRefused) {
  Start();
  TestCall call = MakeCallFor(absl::ZeroDuration());
  Submit(call, true);
  ASSERT_TRUE(call.answer->is_set());
  EXPECT_EQ(ReasonOf(call.answer->Wait().status()), ErrorReason::kDeadlinePassed);
  EXPECT_TRUE(group.seen().empty());
}

TEST_F(StepControllerLifecycleTest, ACallWithoutDeadlineGetsTheServers) {
  options.max_deadline = absl::Seconds(2);
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall unlimited = MakeCall();
  TestCall too_long = MakeCallFor(absl::Hours(1));
  Submit(unlimited);
  Submit(too_long);
  clock.Advance(absl::Seconds(2));
  EXPECT_EQ(unlimited.answer->WaitCode(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(too_long.answer->WaitCode(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(StepControllerLifecycleTest, WithoutEpochTheAnswerComesBeforeTheDeadline) {
  options.no_epoch_margin = absl::Milliseconds(50);
  group.SetEpoch(0);
  group.why_no_epoch = "all ranks are there, but rank 0 could not form epoch 17: no network";
  Start();
  TestCall call = MakeCallFor(absl::Seconds(1));
  TestCall brief = MakeCallFor(absl::Milliseconds(40));
  Submit(call);
  Submit(brief, true);
  clock.Advance(absl::Milliseconds(30));
  EXPECT_EQ(brief.answer->WaitCode(), absl::StatusCode::kUnavailable);
  clock.Advance(absl::Milliseconds(869));
  EXPECT_FALSE(call.answer->is_set());
  clock.Advance(absl::Milliseconds(1));
  EXPECT_EQ(call.answer->WaitCode(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(call.answer->Wait().status()), ErrorReason::kNoEpoch);
  EXPECT_EQ(call.answer->Wait().status().message(),
            "no epoch stood before the call's deadline: all ranks are there, but rank 0 could not "
            "form epoch 17: no network");
  group.SetEpoch(1);
  ExpectNothingInFlight();
}

// gRPC sends a timeout of 10 s and more in tenths of a second, rounded up.
TEST_F(StepControllerLifecycleTest, WithoutEpochLongCallsAreToldWellBeforeTheDeadline) {
  options.no_epoch_margin = absl::Milliseconds(50);
  options.max_deadline = absl::Hours(1);
  group.SetEpoch(0);
  Start();
  for (const absl::Duration timeout : {absl::Seconds(10), absl::Seconds(30), absl::Minutes(5)}) {
    TestCall call = MakeCallFor(timeout);
    Submit(call);
    const absl::Duration margin = std::max(timeout / 50, absl::Milliseconds(250));
    clock.Advance(timeout - margin - absl::Milliseconds(1));
    EXPECT_FALSE(call.answer->is_set());
    clock.Advance(absl::Milliseconds(1));
    EXPECT_EQ(call.answer->WaitCode(), absl::StatusCode::kUnavailable) << timeout;
  }
  group.SetEpoch(1);
  ExpectNothingInFlight();
}

TEST_F(StepControllerLifecycleTest, AnEpochThatComesInTimeServesTheCall) {
  group.SetEpoch(0);
  Start();
  TestCall call = MakeCallFor(absl::Seconds(1));
  Submit(call, true);
  clock.Advance(absl::Milliseconds(850));
  group.SetEpoch(5);
  controller->NotifyEpochChanged();
  ExpectExact(call);
}

TEST_F(StepControllerLifecycleTest, AfterALossTheAnswerSaysSo) {
  group.forms_epochs = false;
  group.script = [this](const GroupStep&, int) {
    group.SetEpoch(0);
    return LostStep();
  };
  Start();
  TestCall call = MakeCallFor(absl::Seconds(1));
  TestCall later = MakeCallFor(absl::Seconds(1));
  Submit(call);
  while (controller->Snapshot().steps_lost == 0) std::this_thread::yield();
  Submit(later);
  clock.Advance(absl::Milliseconds(960));
  EXPECT_EQ(call.answer->WaitCode(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(call.answer->Wait().status()), ErrorReason::kStepLost);
  EXPECT_EQ(call.answer->Wait().status().message(),
            "a rank was lost, and no new epoch stood before the call's deadline: not all ranks are "
            "there");
  EXPECT_EQ(ReasonOf(later.answer->Wait().status()), ErrorReason::kNoEpoch);
  EXPECT_EQ(controller->Snapshot().bytes_in_flight, 0);
}

// ---- Cancellation ----

TEST_F(StepControllerLifecycleTest, CancelTakesAQueuedCallOut) {
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall call = MakeCall({.num_tokens = 3});
  TestCall other = MakeCall({.num_tokens = 2});
  const ForwardCallId id = Submit(call);
  Submit(other);
  controller->Cancel(id);
  ASSERT_TRUE(call.answer->is_set());
  EXPECT_EQ(ReasonOf(call.answer->Wait().status()), ErrorReason::kCallCancelled);
  EXPECT_EQ(controller->Snapshot().tokens_in_flight, 3);
  controller->Cancel(id);
  controller->Cancel(id + 1000);
  gate.Open();
  ExpectExact(other);
  controller->Cancel(id + 1);
  EXPECT_EQ(group.seen()[1].num_tokens, 2);
  ExpectNothingInFlight();
}

TEST_F(StepControllerLifecycleTest, CancelDuringAStepAnswersAtOnceAndReleasesAtItsEnd) {
  Start();
  TestCall blocker = SubmitBlocker();
  const ForwardCallId id = 1;
  controller->Cancel(id);
  ASSERT_TRUE(blocker.answer->is_set());
  EXPECT_EQ(blocker.answer->WaitCode(), absl::StatusCode::kCancelled);
  EXPECT_EQ(controller->Snapshot().calls_in_flight, 1);
  gate.Open();
  ExpectNothingInFlight();
}

TEST_F(StepControllerLifecycleTest, CancelOfASplitCallStopsItsRest) {
  options.max_step_tokens = 2;
  Start();
  TestCall call = MakeCall({.num_tokens = 50});
  const std::byte* begin = call.hidden_begin;
  Gate running;
  group.script = [&](const GroupStep& step, int) {
    for (const TokenShard& shard : step.shards) {
      if (shard.rows.empty() || shard.rows[0].data != begin) continue;
      running.Open();
      gate.Wait();
    }
    return absl::OkStatus();
  };
  const ForwardCallId id = Submit(call);
  running.Wait();
  controller->Cancel(id);
  EXPECT_EQ(call.answer->WaitCode(), absl::StatusCode::kCancelled);
  EXPECT_EQ(controller->Snapshot().queued_tokens, 0);
  gate.Open();
  ExpectNothingInFlight();
  EXPECT_EQ(group.seen().size(), 2u);
}

TEST_F(StepControllerLifecycleTest, CancelOfACallThatWaitsForAReplayReleasesIt) {
  group.forms_epochs = false;
  group.script = [](const GroupStep&, int number) {
    return number == 0 ? LostStep() : absl::OkStatus();
  };
  Start();
  TestCall call = MakeCall({.num_tokens = 3});
  const ForwardCallId id = Submit(call);
  while (controller->Snapshot().steps_lost == 0) std::this_thread::yield();
  controller->Cancel(id);
  EXPECT_EQ(call.answer->WaitCode(), absl::StatusCode::kCancelled);
  EXPECT_EQ(controller->Snapshot().calls_in_flight, 0);
  EXPECT_EQ(controller->Snapshot().bytes_in_flight, 0);
  group.SetEpoch(2);
  ExpectNothingInFlight();
}

// ---- Admission ----

TEST_F(StepControllerLifecycleTest, TooMuchInFlightIsRefusedWithAdvice) {
  options.limits.max_tokens_in_flight = 10;
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall fits = MakeCall({.num_tokens = 9});
  TestCall too_many = MakeCall({.num_tokens = 1});
  TestCall empty = MakeCall({.num_tokens = 0});
  Submit(fits);
  Submit(too_many);
  Submit(empty);
  ASSERT_TRUE(too_many.answer->is_set());
  const absl::Status& status = too_many.answer->Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), ErrorReason::kQueueFull);
  EXPECT_GT(GetCallErrorDetails(status)->retry_after, absl::ZeroDuration());
  EXPECT_TRUE(empty.answer->Wait().ok());
  gate.Open();
  ExpectExact(fits);
  ExpectNothingInFlight();
}

TEST_F(StepControllerLifecycleTest, BytesCountPayloadAndOutput) {
  Start();
  TestCall blocker = SubmitBlocker();
  const int64_t before = controller->Snapshot().bytes_in_flight;
  TestCall call = MakeCall({.num_tokens = 5, .topk = 3});
  Submit(call);
  EXPECT_EQ(controller->Snapshot().bytes_in_flight - before, 5 * (8 * 4 + 8 * 4 + 3 * 4 + 3 * 4));
}

TEST_F(StepControllerLifecycleTest, ACallThatNeverFitsIsToldTheLimit) {
  options.limits.max_tokens_in_flight = 10;
  Start();
  TestCall call = MakeCall({.num_tokens = 11});
  Submit(call);
  const absl::Status& status = call.answer->Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), ErrorReason::kMessageTooLarge);
  EXPECT_EQ(GetCallErrorDetails(status)->value, "11 tokens");
  EXPECT_EQ(GetCallErrorDetails(status)->limit, "10 tokens");
  EXPECT_EQ(GetCallErrorDetails(status)->retry_after, absl::ZeroDuration());
}

// ---- End ----

TEST_F(StepControllerLifecycleTest, DrainRefusesNewCallsAndWaitsForTheOthers) {
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall queued = MakeCall();
  Submit(queued);
  std::thread opener([this] {
    while (!controller->Snapshot().draining) std::this_thread::yield();
    TestCall refused = MakeCall();
    Submit(refused, true);
    EXPECT_EQ(ReasonOf(refused.answer->Wait().status()), ErrorReason::kDraining);
    gate.Open();
  });
  EXPECT_EQ(controller->Drain(clock.Now() + absl::Seconds(1)), 0);
  opener.join();
  ExpectExact(blocker);
  ExpectExact(queued);
  EXPECT_EQ(controller->Drain(clock.Now()), 0);
}

TEST_F(StepControllerLifecycleTest, DrainOutOfTimeAnswersTheRest) {
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall queued = MakeCall();
  Submit(queued);
  std::thread timer([this] {
    while (!controller->Snapshot().draining) std::this_thread::yield();
    clock.Advance(absl::Seconds(1));
  });
  EXPECT_EQ(controller->Drain(clock.Now() + absl::Seconds(1)), 2);
  timer.join();
  for (const TestCall* call : {&blocker, &queued}) {
    EXPECT_EQ(ReasonOf(call->answer->Wait().status()), ErrorReason::kDraining);
  }
}

TEST_F(StepControllerLifecycleTest, DestructionAnswersEveryCall) {
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall queued = MakeCall();
  Submit(queued);
  std::thread opener([&] {
    queued.answer->Wait();
    gate.Open();
  });
  controller.reset();
  opener.join();
  EXPECT_EQ(ReasonOf(queued.answer->Wait().status()), ErrorReason::kDraining);
  EXPECT_EQ(ReasonOf(blocker.answer->Wait().status()), ErrorReason::kDraining);
}

TEST_F(StepControllerLifecycleTest, DestructionWithoutEpochDoesNotWaitForOne) {
  group.SetEpoch(0);
  Start();
  TestCall call = MakeCall();
  Submit(call);
  controller.reset();
  EXPECT_EQ(ReasonOf(call.answer->Wait().status()), ErrorReason::kDraining);
}

}  // namespace
}  // namespace expertmesh
