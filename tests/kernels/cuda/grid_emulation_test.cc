// The emulation itself: it must find the mistakes that it is there for.
#include "tests/kernels/cuda/grid_emulation.h"

#include <set>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

cudaError_t RunGrid(dim3 grid, dim3 block, const std::function<void()>& kernel_thread) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  return RunEmulatedGrid(config, kernel_thread);
}

TEST(GridEmulationTest, EveryThreadRunsOnce) {
  for (const uint64_t order : {0, 1, 17}) {
    SetEmulatedOrder(order);
    std::multiset<std::tuple<unsigned, unsigned, unsigned, unsigned>> seen;
    ASSERT_EQ(RunGrid({3, 2, 1}, {32, 5, 1},
                      [&] {
                        EXPECT_EQ(gridDim.x, 3u);
                        EXPECT_EQ(blockDim.y, 5u);
                        seen.insert({blockIdx.x, blockIdx.y, threadIdx.x, threadIdx.y});
                      }),
              cudaSuccess);
    EXPECT_EQ(seen.size(), 3u * 2 * 32 * 5);
    EXPECT_EQ(std::set(seen.begin(), seen.end()).size(), seen.size());
  }
  SetEmulatedOrder(0);
}

TEST(GridEmulationTest, RefusesWhatNoGpuTakes) {
  const auto nothing = [] {};
  for (const dim3 grid : {dim3(0, 1, 1), dim3(1, 0, 1), dim3(1, 0x10000, 1), dim3(1, 1, 0)}) {
    EXPECT_EQ(RunGrid(grid, {32, 1, 1}, nothing), cudaErrorInvalidConfiguration);
  }
  EXPECT_EQ(RunGrid({1, 1, 1}, {1025, 1, 1}, nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(RunGrid({1, 1, 1}, {0, 1, 1}, nothing), cudaErrorInvalidConfiguration);
}

TEST(GridEmulationTest, BarriersSeparatePhases) {
  for (const uint64_t order : {0, 1, 5}) {
    SetEmulatedOrder(order);
    std::vector<int> values(100, 0);
    std::vector<int> sums(100, 0);
    ASSERT_EQ(RunGrid({1, 1, 1}, {100, 1, 1},
                      [&] {
                        for (int round = 1; round <= 3; ++round) {
                          values[threadIdx.x] = round;
                          __syncthreads();
                          for (const int value : values) sums[threadIdx.x] += value;
                          __syncthreads();
                        }
                      }),
              cudaSuccess);
    EXPECT_EQ(sums, std::vector<int>(100, 600));
  }
  SetEmulatedOrder(0);
}

TEST(GridEmulationTest, Shuffles) {
  for (const uint64_t order : {0, 1, 5}) {
    SetEmulatedOrder(order);
    ASSERT_EQ(RunGrid({2, 1, 1}, {32, 3, 1},
                      [&] {
                        const int lane = static_cast<int>(threadIdx.x);
                        const int tag = static_cast<int>(threadIdx.y) * 100;
                        EXPECT_EQ(__shfl_xor_sync(0xffffffffu, tag + lane, 5), tag + (lane ^ 5));
                        EXPECT_EQ(__shfl_sync(0xffffffffu, tag + lane, 7), tag + 7);
                        EXPECT_EQ(__shfl_down_sync(0xffffffffu, static_cast<float>(lane), 4u),
                                  static_cast<float>(lane < 28 ? lane + 4 : lane));
                        EXPECT_EQ(__ballot_sync(0xffffffffu, lane % 2), 0xaaaaaaaau);
                        EXPECT_EQ(__any_sync(0xffffffffu, lane == 31), 1);
                        EXPECT_EQ(__all_sync(0xffffffffu, lane < 31), 0);
                        EXPECT_EQ(__all_sync(0xffffffffu, lane < 32), 1);
                      }),
              cudaSuccess);
  }
  SetEmulatedOrder(0);
}

// Without a barrier the result depends on the order: what RunInAllOrders looks for.
TEST(GridEmulationTest, OrdersTellRacesApart) {
  std::set<int> results;
  for (const uint64_t order : {0, 1}) {
    SetEmulatedOrder(order);
    int last = -1;
    ASSERT_EQ(RunGrid({1, 1, 1}, {32, 1, 1}, [&] { last = static_cast<int>(threadIdx.x); }),
              cudaSuccess);
    results.insert(last);
  }
  SetEmulatedOrder(0);
  EXPECT_EQ(results.size(), 2u);
}

TEST(GridEmulationDeathTest, MistakesEndTheTest) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH((void)RunGrid({1, 1, 1}, {64, 1, 1},
                             [] {
                               if (threadIdx.x < 40) __syncthreads();
                             }),
               "wait for each other");
  EXPECT_DEATH((void)RunGrid({1, 1, 1}, {32, 1, 1},
                             [] {
                               if (threadIdx.x < 16) __shfl_sync(0xffffffffu, 1, 0);
                             }),
               "has returned");
  EXPECT_DEATH((void)RunGrid({1, 1, 1}, {32, 1, 1},
                             [] {
                               if (threadIdx.x < 16) __shfl_sync(0xffffu, 1, 20);
                             }),
               "outside its mask");
  EXPECT_DEATH(
      (void)RunGrid({1, 1, 1}, {32, 1, 1}, [] { __syncwarp(1u << (threadIdx.x + 1) % 32); }),
      "own mask");
  EXPECT_DEATH(__syncthreads(), "outside a launch");
}

}  // namespace
}  // namespace expertmesh
