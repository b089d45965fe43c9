// Whether steps launch CUDA graphs: what the emulated device alone tells.

#include <cstddef>
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

// Once an arena has its size, its addresses come again: the second time they are captured.
TEST_F(CudaRankGraphsTest, StepsOfAFixedCapacityDo) {
  strategy_ = DispatchMode::kAllToAllFixedCapacity;
  MakeRanks(kRanks, OnGpu(6));
  EXPECT_EQ(GraphLaunches(5), (std::vector<int64_t>{0, 0, kRanks, kRanks, kRanks}));
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
  EXPECT_EQ(launches, (std::vector<int64_t>{0, 0, kRanks - 1, kRanks - 1, kRanks - 1}));
}

}  // namespace
}  // namespace expertmesh
