#include "server/rpc/explain_queue.h"

#include <memory>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

// Shared, so that whoever is last, the test or the queue's thread, still finds it.
using Gate = std::shared_ptr<absl::Notification>;
Gate NewGate() { return std::make_shared<absl::Notification>(); }

TEST(ExplainQueueTest, HoldsSoManyBytesAndNoMore) {
  ExplainQueue queue(100);
  const Gate go = NewGate();
  // One is taken whatever its size, and counted while it runs.
  ASSERT_TRUE(queue.Push(1000, [go] { go->WaitForNotification(); }));
  EXPECT_FALSE(queue.Push(1, [] {}));
  go->Notify();
}

TEST(ExplainQueueTest, MakesRoomWhenWorkIsDone) {
  ExplainQueue queue(100);
  for (int i = 0; i < 100; ++i) {
    const Gate go = NewGate();
    const Gate done = NewGate();
    ASSERT_TRUE(queue.Push(60, [go] { go->WaitForNotification(); })) << i;
    EXPECT_FALSE(queue.Push(41, [] {}));
    ASSERT_TRUE(queue.Push(40, [] {}));
    ASSERT_TRUE(queue.Push(0, [done] { done->Notify(); }));
    go->Notify();
    done->WaitForNotification();
  }
}

}  // namespace
}  // namespace expertmesh
