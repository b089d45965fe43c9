#include "server/rpc/explain_queue.h"

#include <future>
#include <memory>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

// Shared, so that whoever is last, the test or the queue's thread, still finds it.
using Gate = std::shared_ptr<absl::Notification>;
Gate NewGate() { return std::make_shared<absl::Notification>(); }

ExplainQueue::Work WaitFor(const Gate& gate) {
  return [gate](const absl::Status&) { gate->WaitForNotification(); };
}

constexpr absl::Time kNever = absl::InfiniteFuture();

TEST(ExplainQueueTest, HoldsSoManyBytesAndNoMore) {
  ExplainQueue queue(100);
  const Gate go = NewGate();
  // One is taken whatever its size, and counted while it runs.
  ASSERT_NE(queue.Push(1000, kNever, WaitFor(go)), 0u);
  EXPECT_EQ(queue.Push(1, kNever, [](const absl::Status&) {}), 0u);
  go->Notify();
}

TEST(ExplainQueueTest, MakesRoomWhenWorkIsDone) {
  ExplainQueue queue(100);
  for (int i = 0; i < 100; ++i) {
    const Gate go = NewGate();
    const Gate done = NewGate();
    ASSERT_NE(queue.Push(60, kNever, WaitFor(go)), 0u) << i;
    EXPECT_EQ(queue.Push(41, kNever, [](const absl::Status&) {}), 0u);
    ASSERT_NE(queue.Push(40, kNever, [](const absl::Status&) {}), 0u);
    ASSERT_NE(queue.Push(0, kNever, [done](const absl::Status&) { done->Notify(); }), 0u);
    go->Notify();
    done->WaitForNotification();
  }
}

TEST(ExplainQueueTest, WhatWaitsEndsAtItsDeadlineOrCancelled) {
  ExplainQueue queue(1000);
  const Gate go = NewGate();
  ASSERT_NE(queue.Push(10, kNever, WaitFor(go)), 0u);
  std::promise<absl::Status> late, cancelled, run;
  const auto tell = [](std::promise<absl::Status>* promise) {
    return [promise](const absl::Status& status) { promise->set_value(status); };
  };
  ASSERT_NE(queue.Push(10, kNever, tell(&run)), 0u);
  const ExplainQueue::Id id = queue.Push(10, kNever, tell(&cancelled));
  ASSERT_NE(queue.Push(10, absl::Now() + absl::Milliseconds(20), tell(&late)), 0u);
  const absl::Status deadline = late.get_future().get();
  EXPECT_EQ(GetCallErrorDetails(deadline).value().reason, ErrorReason::kDeadlinePassed) << deadline;
  queue.Cancel(id);
  const absl::Status cancel = cancelled.get_future().get();
  EXPECT_EQ(GetCallErrorDetails(cancel).value().reason, ErrorReason::kCallCancelled) << cancel;
  queue.Cancel(id);
  go->Notify();
  EXPECT_TRUE(run.get_future().get().ok());
}

}  // namespace
}  // namespace expertmesh
