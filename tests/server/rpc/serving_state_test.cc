#include "server/rpc/serving_state.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <utility>

#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

using Answer = absl::StatusOr<const ServingBackend*>;

struct Waiting {
  ServingState::WaitId id = 0;
  std::future<Answer> answer;
};

Waiting StartWait(ServingState* state, absl::Duration time, int64_t bytes) {
  auto promise = std::make_shared<std::promise<Answer>>();
  Waiting waiting;
  waiting.answer = promise->get_future();
  waiting.id = state->Wait(absl::Now() + time, bytes,
                           [promise](Answer answer) { promise->set_value(std::move(answer)); });
  return waiting;
}

bool IsDone(const Waiting& waiting) {
  return waiting.answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

ErrorReason ReasonOf(Waiting* waiting) {
  return GetCallErrorDetails(waiting->answer.get().status()).value().reason;
}

TEST(ServingStateTest, CallsWaitUntilServing) {
  ServingState state(1000);
  Waiting early = StartWait(&state, absl::Minutes(1), 10);
  EXPECT_FALSE(IsDone(early));
  EXPECT_EQ(state.backend(), nullptr);
  state.StartServing(ServingBackend());
  ASSERT_TRUE(IsDone(early));
  EXPECT_EQ(*early.answer.get(), state.backend());
  Waiting late = StartWait(&state, absl::Minutes(1), 10);
  ASSERT_TRUE(IsDone(late));
  EXPECT_EQ(*late.answer.get(), state.backend());
}

TEST(ServingStateTest, ToldBeforeTheDeadlineThatNothingIsThere) {
  ServingState state(1000);
  const absl::Time start = absl::Now();
  Waiting waiting = StartWait(&state, absl::Milliseconds(200), 10);
  Waiting longer = StartWait(&state, absl::Minutes(1), 10);
  EXPECT_EQ(ReasonOf(&waiting), ErrorReason::kNoEpoch);
  EXPECT_LT(absl::Now() - start, absl::Seconds(45));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(150));
  EXPECT_FALSE(IsDone(longer));
}

TEST(ServingStateTest, WaitingIsBounded) {
  ServingState state(25);
  Waiting first = StartWait(&state, absl::Minutes(1), 20);
  Waiting second = StartWait(&state, absl::Minutes(1), 20);
  ASSERT_TRUE(IsDone(second));
  EXPECT_EQ(ReasonOf(&second), ErrorReason::kQueueFull);
  state.CancelWait(first.id);
  EXPECT_EQ(ReasonOf(&first), ErrorReason::kCallCancelled);
  Waiting third = StartWait(&state, absl::Minutes(1), 20);
  EXPECT_FALSE(IsDone(third));
}

TEST(ServingStateTest, DrainingEndsWaitingAndStays) {
  ServingState state(1000);
  Waiting waiting = StartWait(&state, absl::Minutes(1), 10);
  state.StartDraining();
  EXPECT_EQ(ReasonOf(&waiting), ErrorReason::kDraining);
  state.StartServing(ServingBackend());
  Waiting late = StartWait(&state, absl::Minutes(1), 10);
  EXPECT_EQ(ReasonOf(&late), ErrorReason::kDraining);
}

}  // namespace
}  // namespace expertmesh
