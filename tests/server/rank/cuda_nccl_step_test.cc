// Ranks on the emulated device that exchange their rows by NCCL: a step never comes back to the
// host before its end, and a failed exchange fails the step.

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/rank/rank_step.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"
#include "tests/server/comm/fake_nccl_on_cuda.h"
#include "tests/server/comm/nccl_group.h"
#include "tests/server/rank/cuda_rank_engine_fixture.h"

namespace expertmesh {
namespace {

constexpr int32_t kRanks = 2;

class CudaNcclStepTest : public CudaRankEngineFixture {
 protected:
  ~CudaNcclStepTest() override { HangEmulatedDevice(false); }

  void MakeNcclRanks(uint64_t seed) {
    engines_.clear();
    MakeRanks(kRanks, OnGpu(seed));
    nccl_ = std::make_shared<FakeNcclOnCuda>();
    std::vector<std::unique_ptr<Communicator>> communicators = NewNcclGroup(kRanks, nccl_, 8, 9);
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      engines_[rank]->EnterEpoch(8, 9, std::move(communicators[rank]));
    }
  }
  static int64_t NumGiven() {
    const EmulatedCudaCounts counts = CountEmulatedCuda();
    return counts.launches + counts.graph_launches + counts.copies;
  }
  // Until `num_given` pieces of work have been given to the device since.
  static bool WaitUntilGiven(int64_t num_given) {
    const absl::Time deadline = Soon();
    while (NumGiven() < num_given) {
      if (absl::Now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  std::shared_ptr<FakeNcclOnCuda> nccl_;
};

// All of a step, shared experts included, is given to a device that does none of it meanwhile.
TEST_F(CudaNcclStepTest, NothingOfAStepWaitsForTheHost) {
  uint64_t seed = 0;
  for (const DispatchMode strategy : {DispatchMode::kAllToAll, DispatchMode::kAllToAllFixedCapacity,
                                      DispatchMode::kAllGatherReduceScatter}) {
    SCOPED_TRACE(std::string(DispatchModeName(strategy)));
    strategy_ = strategy;
    MakeNcclRanks(++seed);
    // Warm: with the graphs that it will have.
    for (int step = 0; step < 3; ++step) RunAll();
    int64_t before = NumGiven();
    const std::vector<std::byte> expected = RunAll();
    const int64_t num_given = NumGiven() - before;
    ASSERT_GT(num_given, 0);

    HangEmulatedDevice(true);
    before = NumGiven();
    std::vector<std::byte> outputs;
    std::thread step([&] { outputs = RunAll(); });
    EXPECT_TRUE(WaitUntilGiven(before + num_given))
        << NumGiven() - before << " of " << num_given << " pieces of work";
    HangEmulatedDevice(false);
    step.join();
    EXPECT_EQ(outputs, expected);
    EXPECT_EQ(NumGiven() - before, num_given);
  }
}

// The same of a step that others may overlap, which has places in the order of all exchanges.
TEST_F(CudaNcclStepTest, NorDoesOneThatTakesItsTurn) {
  strategy_ = DispatchMode::kAllToAll;
  MakeNcclRanks(1);
  int64_t place = 0;
  const auto run = [&] {
    StepPlan plan = Plan();
    std::vector<std::vector<std::byte>> outputs(kRanks);
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      StepHeader& header = plan.slices[rank].header;
      header.dispatch_order = place;
      header.combine_order = place + 1;
      threads.emplace_back([&, rank] {
        RankEngine& engine = *engines_[rank];
        auto result =
            engine.RunStep(plan.slices[rank], Shard(plan, rank), Soon(), engine.TakeTurn());
        ASSERT_TRUE(result.ok()) << result.status();
        outputs[rank].assign(result->output.rows,
                             result->output.rows + result->output.num_rows * kHidden * 2);
      });
    }
    for (std::thread& thread : threads) thread.join();
    place += 2;
    return outputs;
  };
  int64_t before = NumGiven();
  const auto expected = run();
  const int64_t num_given = NumGiven() - before;
  HangEmulatedDevice(true);
  before = NumGiven();
  std::vector<std::vector<std::byte>> outputs;
  std::thread step([&] { outputs = run(); });
  EXPECT_TRUE(WaitUntilGiven(before + num_given))
      << NumGiven() - before << " of " << num_given << " pieces of work";
  HangEmulatedDevice(false);
  step.join();
  EXPECT_EQ(outputs, expected);
}

// The one strategy whose host reads what has come, before the rows are in order on any rank.
TEST_F(CudaNcclStepTest, ARankThatRoutesReadsWhatHasCome) {
  strategy_ = DispatchMode::kAllGatherReduceScatterMonolithic;
  MakeRanks(kRanks, OnGpu(1));
  const std::vector<std::byte> expected = RunAll();
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    MakeNcclRanks(seed);
    EXPECT_EQ(RunAll(), expected);
  }
}

// The device has run the whole step, on what an aborted exchange has left.
TEST_F(CudaNcclStepTest, AnAbortedExchangeFailsTheStepThatRanOn) {
  strategy_ = DispatchMode::kAllToAll;
  MakeNcclRanks(1);
  int64_t before = NumGiven();
  RunAll();
  const int64_t num_given = NumGiven() - before;
  FakeNccl::Faults faults;
  faults.operations_hang = true;
  for (int32_t rank = 0; rank < kRanks; ++rank) nccl_->nccl().SetFaults(rank, faults);
  const StepPlan plan = Plan();
  std::vector<std::thread> threads;
  before = NumGiven();
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const absl::Status status =
          engines_[rank]->RunStep(plan.slices[rank], Shard(plan, rank), Soon()).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    });
  }
  EXPECT_TRUE(WaitUntilGiven(before + num_given));
  engines_[1]->Abort(absl::InternalError("why"));
  for (std::thread& thread : threads) thread.join();
  engines_.clear();
  EXPECT_EQ(nccl_->nccl().misuses(), "");
}

}  // namespace
}  // namespace expertmesh
