// What only the emulated device can be made to do.

#include <string>

#include "gtest/gtest.h"
#include "server/rank/rank_step.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"
#include "tests/server/rank/cuda_rank_engine_fixture.h"

namespace expertmesh {
namespace {

class CudaRankFailureTest : public CudaRankEngineFixture {};

TEST_F(CudaRankFailureTest, TellsItsDeviceAndWhatItTakes) {
  MakeRanks(2, OnGpu(1));
  RankBackend& backend = engines_[0]->backend();
  EXPECT_EQ(backend.device_name(), "cuda:0");
  EXPECT_STREQ(backend.instruction_set(), "sm_90");
  EXPECT_EQ(engines_[0]->weight_bytes(), (3 * 3 * kHidden * 10 + 3 * kHidden * 14 + kHidden) * 4);
  ASSERT_TRUE(backend.device_free_bytes().has_value());
  EXPECT_LE(*backend.device_free_bytes(), (int64_t{1} << 30) - 2 * engines_[0]->weight_bytes());
}

// A device that is lost fails the step, and says so, instead of giving any bytes.
TEST_F(CudaRankFailureTest, ALostDeviceFailsTheStep) {
  for (const int64_t num_successes : {0, 1, 5, 9}) {
    engines_.clear();
    MakeRanks(1, OnGpu(4));
    const StepPlan plan = Plan();
    EXPECT_TRUE(engines_[0]->backend().device_status().ok());
    FailEmulatedWork(cudaErrorIllegalAddress, num_successes);
    const absl::Status status =
        engines_[0]->RunStep(plan.slices[0], Shard(plan, 0), Soon()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_EQ(engines_[0]->backend().device_status().code(), absl::StatusCode::kInternal);
  }
}

// A copy from memory that is not pinned would make the thread wait for its stream.
TEST_F(CudaRankFailureTest, NoCopyOfAStepBlocks) {
  for (const DispatchMode strategy :
       {DispatchMode::kAllToAll, DispatchMode::kAllGatherReduceScatter,
        DispatchMode::kAllGatherReduceScatterMonolithic}) {
    SCOPED_TRACE(std::string(DispatchModeName(strategy)));
    engines_.clear();
    strategy_ = strategy;
    MakeRanks(2, OnGpu(5));
    const int64_t before = CountEmulatedCuda().pageable_copies;
    RunAll();
    EXPECT_EQ(CountEmulatedCuda().pageable_copies, before);
  }
}

// Which is no reason to end the process.
TEST_F(CudaRankFailureTest, AFailureThatPassesIsNoLostDevice) {
  MakeRanks(1, OnGpu(4));
  const StepPlan plan = Plan();
  FailEmulatedCall("cudaEventRecord", cudaErrorInvalidValue);
  EXPECT_FALSE(engines_[0]->RunStep(plan.slices[0], Shard(plan, 0), Soon()).ok());
  EXPECT_TRUE(engines_[0]->backend().device_status().ok());
}

}  // namespace
}  // namespace expertmesh
