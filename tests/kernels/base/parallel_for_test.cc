#include "kernels/base/parallel_for.h"

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

constexpr double kManyMicros = 1e6;

ParallelForOptions Threads(int num_threads, int64_t spin_micros = 0) {
  ParallelForOptions options;
  options.num_threads = num_threads;
  options.spin_micros = spin_micros;
  return options;
}

class ParallelForTest : public testing::TestWithParam<int64_t> {};  // spin_micros

TEST_P(ParallelForTest, EveryTaskOnceByAKnownWorker) {
  for (const int num_threads : {1, 2, 3, 7}) {
    ParallelFor parallel_for(Threads(num_threads, GetParam()));
    EXPECT_EQ(parallel_for.num_threads(), num_threads);
    for (const int64_t num_tasks : {0, 1, 2, 3, 100, 1000}) {
      std::vector<int> runs(static_cast<size_t>(num_tasks), 0);  // racy if a task ran twice: TSan
      std::atomic<bool> workers_fit{true};
      parallel_for.Run(num_tasks, kManyMicros, [&](int64_t task, int worker) {
        ++runs[static_cast<size_t>(task)];
        if (worker < 0 || worker >= num_threads) workers_fit = false;
      });
      EXPECT_EQ(std::accumulate(runs.begin(), runs.end(), int64_t{0}), num_tasks);
      for (const int count : runs) EXPECT_EQ(count, 1);
      EXPECT_TRUE(workers_fit);
    }
  }
}

// Tiny jobs one after the other: workers wake for jobs that are over, and must neither run them nor
// mix them up.
TEST_P(ParallelForTest, ManyShortJobs) {
  ParallelFor parallel_for(Threads(4, GetParam()));
  for (int job = 0; job < 2000; ++job) {
    int64_t sums[3] = {0, 0, 0};
    parallel_for.Run(3, kManyMicros, [&sums, job](int64_t task, int) { sums[task] += job + task; });
    ASSERT_EQ(sums[0] + sums[1] + sums[2], 3 * job + 3);
  }
}

TEST_P(ParallelForTest, AWorkerHasOneTaskAtATime) {
  ParallelFor parallel_for(Threads(3, GetParam()));
  int64_t per_worker[3] = {0, 0, 0};  // unguarded on purpose: TSan sees a worker index given twice
  parallel_for.Run(3000, kManyMicros, [&per_worker](int64_t, int worker) { ++per_worker[worker]; });
  EXPECT_EQ(per_worker[0] + per_worker[1] + per_worker[2], 3000);
}

// Two tasks that each wait for the other can end only if two threads run them.
TEST_P(ParallelForTest, ReallyRunsInParallel) {
  ParallelFor parallel_for(Threads(2, GetParam()));
  std::atomic<int> arrived{0};
  parallel_for.Run(2, kManyMicros, [&arrived](int64_t, int) {
    ++arrived;
    while (arrived.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived.load(), 2);
}

TEST_P(ParallelForTest, SeveralTeamsAtOnce) {
  std::vector<std::thread> owners;
  for (int owner = 0; owner < 3; ++owner) {
    owners.emplace_back([spin_micros = GetParam()] {
      ParallelFor parallel_for(Threads(3, spin_micros));
      for (int job = 0; job < 100; ++job) {
        std::atomic<int64_t> sum{0};
        parallel_for.Run(50, kManyMicros, [&sum](int64_t task, int) { sum += task; });
        ASSERT_EQ(sum.load(), 49 * 50 / 2);
      }
    });
  }
  for (std::thread& owner : owners) owner.join();
}

INSTANTIATE_TEST_SUITE_P(Spin, ParallelForTest, testing::Values(0, 50));

TEST(ParallelForInlineTest, SmallJobsStayOnTheCallerInOrder) {
  ParallelFor parallel_for(Threads(4));
  std::vector<int64_t> order;
  parallel_for.Run(10, ParallelFor::kMinParallelMicros / 2, [&order](int64_t task, int worker) {
    EXPECT_EQ(worker, 0);
    order.push_back(task);
  });
  std::vector<int64_t> ascending(10);
  std::iota(ascending.begin(), ascending.end(), 0);
  EXPECT_EQ(order, ascending);
}

TEST(ParallelForInlineTest, DestroyedWithoutEverRunning) { ParallelFor parallel_for(Threads(8)); }

}  // namespace
}  // namespace expertmesh
