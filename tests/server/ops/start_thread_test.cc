#include "server/ops/start_thread.h"

#include <gtest/gtest.h>

#include <atomic>

#include "tests/server/ops/no_more_threads.h"

namespace expertmesh {
namespace {

TEST(StartThreadTest, RunsOrSaysThatItCannot) {
  std::atomic<int> num_runs{0};
  {
    const NoMoreThreads none;
    const absl::StatusOr<std::thread> refused = StartThread([&num_runs] { ++num_runs; });
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  }
  absl::StatusOr<std::thread> thread = StartThread([&num_runs] { ++num_runs; });
  ASSERT_TRUE(thread.ok()) << thread.status();
  thread->join();
  EXPECT_EQ(num_runs, 1);
}

}  // namespace
}  // namespace expertmesh
