// The whole of a GPU's rank, on a GPU or on the emulated device: there what is missing a wait, or
// touches the GPU's memory from the host, shows.

#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/dtype.h"
#include "server/rank/rank_step.h"
#include "tests/server/rank/cuda_rank_engine_fixture.h"

namespace expertmesh {
namespace {

constexpr DispatchMode kStrategies[] = {DispatchMode::kAuto, DispatchMode::kAllToAllFixedCapacity,
                                        DispatchMode::kAllGatherReduceScatter,
                                        DispatchMode::kAllGatherReduceScatterMonolithic};

class CudaRankEngineTest : public CudaRankEngineFixture {
 protected:
  // Within what the order of float32 sums and one rounding to bfloat16 explain.
  static void ExpectNear(const std::vector<std::byte>& actual,
                         const std::vector<std::byte>& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (int64_t i = 0; i < static_cast<int64_t>(actual.size()) / 2; ++i) {
      const float wanted = LoadFloat(expected.data(), DType::kBFloat16, i);
      ASSERT_NEAR(LoadFloat(actual.data(), DType::kBFloat16, i), wanted,
                  1e-2f * (std::abs(wanted) + 0.1f))
          << i;
    }
  }
};

// With every strategy and format, whatever the order in which the streams' work runs.
TEST_F(CudaRankEngineTest, BytesDependOnPlacementAlone) {
  for (const int32_t ep_size : {1, 3}) {
    std::vector<std::byte> given_routing;  // of all strategies but the one that routes by itself
    uint64_t seed = 0;
    for (const DispatchMode strategy : kStrategies) {
      strategy_ = strategy;
      MakeRanks(ep_size, NewHostBackend);
      const std::vector<std::byte> on_host = RunAll();
      std::vector<std::byte> expected;
      if (strategy != DispatchMode::kAllGatherReduceScatterMonolithic) expected = given_routing;
      for (const ActivationFormat format :
           {ActivationFormat::kContiguous, ActivationFormat::kBatched}) {
        SCOPED_TRACE(std::string(DispatchModeName(strategy)) + " of " + std::to_string(ep_size) +
                     " ranks, seed " + std::to_string(seed + 1));
        format_ = format;
        engines_.clear();
        MakeRanks(ep_size, OnGpu(++seed));
        for (int round = 0; round < 3; ++round) {
          const std::vector<std::byte> outputs = RunAll();
          ExpectNear(outputs, on_host);
          if (expected.empty()) expected = outputs;
          ASSERT_EQ(outputs, expected);
        }
      }
      if (given_routing.empty()) given_routing = expected;
    }
  }
}

TEST_F(CudaRankEngineTest, ADeadlineEndsAStepWhosePeerNeverComes) {
  MakeRanks(2, OnGpu(2));
  const StepPlan plan = Plan();
  const absl::Status status =
      engines_[0]
          ->RunStep(plan.slices[0], Shard(plan, 0), absl::Now() + absl::Milliseconds(10))
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  const absl::Status late = engines_[1]->RunStep(plan.slices[1], Shard(plan, 1), Soon()).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kAborted) << late;
}

TEST_F(CudaRankEngineTest, AnAbortEndsAStep) {
  MakeRanks(3, OnGpu(3));
  const StepPlan plan = Plan();
  std::vector<std::thread> threads;
  for (const int32_t rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      const absl::Status status =
          engines_[rank]->RunStep(plan.slices[rank], Shard(plan, rank), Soon()).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    });
  }
  engines_[2]->Abort(absl::InternalError("why"));
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace expertmesh
