// Whether steps launch CUDA graphs: what the emulated device alone tells.

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"
#include "tests/server/rank/cuda_rank_engine_fixture.h"

namespace expertmesh {
namespace {

class CudaRankGraphsTest : public CudaRankEngineFixture {
 protected:
  static constexpr int32_t kRanks = 2;

  // Of each step.
  std::vector<int64_t> GraphLaunches(int num_steps) {
    std::vector<int64_t> launches;
    for (int step = 0; step < num_steps; ++step) {
      const int64_t before = CountEmulatedCuda().graph_launches;
      const std::vector<std::byte> outputs = RunAll();
      launches.push_back(CountEmulatedCuda().graph_launches - before);
      if (outputs_.empty()) outputs_ = outputs;
      EXPECT_EQ(outputs, outputs_);
    }
    return launches;
  }

  std::vector<std::byte> outputs_;
};

// An arena gives its addresses again: the second time they are captured.
TEST_F(CudaRankGraphsTest, StepsOfAFixedCapacityDo) {
  strategy_ = DispatchMode::kAllToAllFixedCapacity;
  MakeRanks(kRanks, OnGpu(6));
  EXPECT_EQ(GraphLaunches(5), (std::vector<int64_t>{0, kRanks, kRanks, kRanks, kRanks}));
}

// Neither the routing nor the number of tokens within a bucket moves what a graph has seen.
TEST_F(CudaRankGraphsTest, StepsOfOneBucketShareThem) {
  MakeRanks(kRanks, OnGpu(9));
  std::vector<int64_t> launches;
  for (const int64_t num_tokens : {16, 9, 13, 15, 10, 12, 16}) {
    SCOPED_TRACE("step of " + std::to_string(num_tokens));
    std::mt19937_64 random(static_cast<uint64_t>(num_tokens));
    routing_ = MakeRandomRouting(random, kTokens, 3, kExperts);
    // A rank without rows would launch nothing.
    routing_.topk_ids[0] = 0;
    routing_.topk_ids[1] = kExperts - 1;
    routing_.topk_weights[0] = routing_.topk_weights[1] = 0.5f;
    num_tokens_ = num_tokens;
    strategy_ = DispatchMode::kAllToAll;
    const std::vector<std::byte> expected = RunAll();
    strategy_ = DispatchMode::kAllToAllFixedCapacity;
    const int64_t before = CountEmulatedCuda().graph_launches;
    EXPECT_EQ(RunAll(), expected);
    launches.push_back(CountEmulatedCuda().graph_launches - before);
  }
  EXPECT_EQ(launches, (std::vector<int64_t>{0, kRanks, kRanks, kRanks, kRanks, kRanks, kRanks}));
}

TEST_F(CudaRankGraphsTest, OthersDoNot) {
  strategy_ = DispatchMode::kAllToAll;
  MakeRanks(kRanks, OnGpu(7));
  EXPECT_EQ(GraphLaunches(4), (std::vector<int64_t>{0, 0, 0, 0}));
}

TEST_F(CudaRankGraphsTest, WithoutGraphsStepsGoOn) {
  strategy_ = DispatchMode::kAllToAllFixedCapacity;
  MakeRanks(kRanks, OnGpu(8));
  FailEmulatedCall("cudaGraphInstantiate", cudaErrorMemoryAllocation);
  const std::vector<int64_t> launches = GraphLaunches(5);
  // The other rank has its graphs all the same.
  EXPECT_EQ(launches, (std::vector<int64_t>{0, kRanks - 1, kRanks - 1, kRanks - 1, kRanks - 1}));
}

}  // namespace
}  // namespace expertmesh
