#include "server/rpc/explain_queue.h"

#include <future>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

TEST(ExplainQueueTest, HoldsSoManyBytesAndNoMore) {
  ExplainQueue queue(100);
  std::promise<void> go;
  // One is taken whatever its size, and counted while it runs.
  ASSERT_TRUE(queue.Push(1000, [&] { go.get_future().wait(); }));
  EXPECT_FALSE(queue.Push(1, [] {}));
  go.set_value();
}

TEST(ExplainQueueTest, MakesRoomWhenWorkIsDone) {
  ExplainQueue queue(100);
  for (int i = 0; i < 100; ++i) {
    std::promise<void> go;
    std::promise<void> done;
    ASSERT_TRUE(queue.Push(60, [&] { go.get_future().wait(); })) << i;
    EXPECT_FALSE(queue.Push(41, [] {}));
    ASSERT_TRUE(queue.Push(40, [] {}));
    ASSERT_TRUE(queue.Push(0, [&] { done.set_value(); }));
    go.set_value();
    done.get_future().wait();
  }
}

}  // namespace
}  // namespace expertmesh
