#include "server/rank/rank_engine.h"

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/rank/rank_step.h"
#include "tests/server/rank/fake_device_backend.h"
#include "tests/server/rank/rank_engine_fixture.h"

namespace expertmesh {
namespace {

// A device for all ranks of a group.
NewBackend OnFakeDevice() {
  return [device = std::make_shared<FakeDevice>()] { return NewFakeDeviceBackend(device); };
}

class RankEngineTest : public RankEngineFixture {};

// Nothing above the kernels touches device memory from the host or out of a stream's order.
TEST_F(RankEngineTest, ADeviceGivesTheBytesOfTheHost) {
  for (const int32_t ep_size : {1, 3}) {
    for (const DispatchMode strategy :
         {DispatchMode::kAuto, DispatchMode::kAllToAllFixedCapacity,
          DispatchMode::kAllGatherReduceScatter, DispatchMode::kAllGatherReduceScatterMonolithic}) {
      SCOPED_TRACE(DispatchModeName(strategy));
      strategy_ = strategy;
      MakeRanks(ep_size, NewHostBackend);
      const std::vector<std::byte> expected = RunAll();
      ASSERT_EQ(static_cast<int64_t>(expected.size()), kTokens * kHidden * 2);
      MakeRanks(ep_size, OnFakeDevice());
      for (int round = 0; round < 5; ++round) EXPECT_EQ(RunAll(), expected);
    }
  }
}

TEST_F(RankEngineTest, DeadlineWhenAPeerNeverComes) {
  for (const NewBackend& new_backend : {NewBackend(NewHostBackend), OnFakeDevice()}) {
    MakeRanks(2, new_backend);
    const StepPlan plan = Plan();
    const absl::Status status =
        engines_[0]
            ->RunStep(plan.slices[0], Shard(plan, 0), absl::Now() + absl::Milliseconds(10))
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    // The step took the epoch with it, for the peer too.
    const absl::Status late = engines_[1]->RunStep(plan.slices[1], Shard(plan, 1), Soon()).status();
    EXPECT_EQ(late.code(), absl::StatusCode::kAborted) << late;
  }
}

TEST_F(RankEngineTest, DeadlineWhenARankThatRoutesWaitsForLogits) {
  strategy_ = DispatchMode::kAllGatherReduceScatterMonolithic;
  for (const NewBackend& new_backend : {NewBackend(NewHostBackend), OnFakeDevice()}) {
    MakeRanks(2, new_backend);
    const StepPlan plan = Plan();
    const absl::Status status =
        engines_[0]
            ->RunStep(plan.slices[0], Shard(plan, 0), absl::Now() + absl::Milliseconds(10))
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  }
}

TEST_F(RankEngineTest, AbortEndsAStep) {
  for (const NewBackend& new_backend : {NewBackend(NewHostBackend), OnFakeDevice()}) {
    MakeRanks(3, new_backend);
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
}

TEST_F(RankEngineTest, AStepThatIsDroppedLetsItsPeersGo) {
  for (const NewBackend& new_backend : {NewBackend(NewHostBackend), OnFakeDevice()}) {
    MakeRanks(2, new_backend);
    const StepPlan plan = Plan();
    std::thread peer([&] {
      const absl::Status status =
          engines_[1]->RunStep(plan.slices[1], Shard(plan, 1), Soon()).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    });
    auto step = engines_[0]->Begin(plan.slices[0], Shard(plan, 0));
    EXPECT_TRUE(step.ok()) << step.status();
    step->reset();
    peer.join();
  }
}

TEST_F(RankEngineTest, RefusesSlices) {
  MakeRanks(1, NewHostBackend);
  const StepPlan plan = Plan();
  const auto run = [&](StepSlice slice) {
    return engines_[0]->RunStep(std::move(slice), Shard(plan, 0), Soon()).status().code();
  };
  StepSlice slice = plan.slices[0];
  slice.header.epoch = 8;
  EXPECT_EQ(run(slice), absl::StatusCode::kUnavailable);
  slice = plan.slices[0];
  slice.header.incarnation = 9;
  EXPECT_EQ(run(slice), absl::StatusCode::kUnavailable);
  slice = plan.slices[0];
  slice.header.model = "other";
  EXPECT_EQ(run(slice), absl::StatusCode::kNotFound);
  slice = plan.slices[0];
  slice.header.layer = 0;  // in the model, not loaded
  EXPECT_EQ(run(slice), absl::StatusCode::kNotFound);
  slice = plan.slices[0];
  slice.header.strategy = DispatchMode::kAuto;
  EXPECT_EQ(run(slice), absl::StatusCode::kInvalidArgument);
  slice = plan.slices[0];
  slice.header.activation_dtype = DType::kInt8;
  EXPECT_EQ(run(slice), absl::StatusCode::kInvalidArgument);
  slice = plan.slices[0];
  slice.send_rows.pop_back();
  EXPECT_EQ(run(slice), absl::StatusCode::kInvalidArgument);
}

TEST_F(RankEngineTest, LoadsALayerOnce) {
  MakeRanks(2, NewHostBackend);
  RankEngine& engine = *engines_[1];
  const std::vector<LayerSpec>& layers = source_->model().layers;
  const int64_t one_layer_bytes = engine.weight_bytes();
  EXPECT_GE(one_layer_bytes, 3 * 3 * kHidden * 10 * 4);
  EXPECT_EQ(engine.LoadLayer(*source_, layers[1], *placement_, [](int64_t) {}).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(
      engine.LoadLayer(*source_, layers[0], *Placement::Contiguous(kExperts, 3), [](int64_t) {})
          .code(),
      absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine.weight_bytes(), one_layer_bytes);
  // Layer 0 has no shared experts.
  std::atomic<int64_t> progress_bytes{0};  // several threads tell of it at once
  EXPECT_TRUE(engine
                  .LoadLayer(*source_, layers[0], *placement_,
                             [&](int64_t num_bytes) { progress_bytes += num_bytes; })
                  .ok());
  EXPECT_EQ(progress_bytes, 3 * 3 * kHidden * 10 * 4);
  EXPECT_GE(engine.weight_bytes(), one_layer_bytes + progress_bytes);
  EXPECT_LT(engine.weight_bytes(), 2 * one_layer_bytes);
}

TEST_F(RankEngineTest, RefusesSharedExpertsThatALayerHasNot) {
  MakeRanks(1, NewHostBackend);
  const absl::Status loaded =
      engines_[0]->LoadLayer(*source_, source_->model().layers[0], *placement_, [](int64_t) {});
  ASSERT_TRUE(loaded.ok()) << loaded;
  const StepPlan plan = Plan();
  StepSlice slice = plan.slices[0];
  slice.header.layer = 0;
  const absl::Status status = engines_[0]->RunStep(slice, Shard(plan, 0), Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("include_shared_experts"));
}

}  // namespace
}  // namespace expertmesh
