#include "server/rank/rank_engine.h"

#include <atomic>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/comm/in_process_communicator.h"
#include "server/model/synthetic_weight_source.h"
#include "server/planning/monolithic_plan.h"
#include "server/rank/rank_step.h"
#include "tests/server/planning/random_routing.h"
#include "tests/server/rank/fake_device_backend.h"

namespace expertmesh {
namespace {

constexpr int32_t kExperts = 6;
constexpr int64_t kHidden = 24;
constexpr int64_t kTokens = 21;

std::unique_ptr<SyntheticWeightSource> MakeSource() {
  ModelSpec model;
  model.name = "m";
  model.architecture = "RandomForCausalLM";
  model.hidden_size = kHidden;
  model.weight_dtype = DType::kFloat32;
  for (const int32_t index : {0, 2}) {
    LayerSpec layer;
    layer.index = index;
    layer.num_experts = kExperts;
    layer.topk = 3;
    layer.intermediate_size = 10;
    layer.shared_intermediate_size = index == 2 ? 14 : 0;
    layer.shared_gated = true;
    model.layers.push_back(layer);
  }
  return *SyntheticWeightSource::Create(std::move(model), 3);
}

std::unique_ptr<RankBackend> NewHostBackend() {
  CpuRankBackendOptions options;
  options.threads.num_threads = 2;
  options.allocator = std::make_shared<HostBufferPool>(HostBufferPoolOptions{.poison_byte = 0xff});
  return *NewCpuRankBackend(options);
}

using NewBackend = std::function<std::unique_ptr<RankBackend>()>;

// A device for all ranks of a group.
NewBackend OnFakeDevice() {
  return [device = std::make_shared<FakeDevice>()] { return NewFakeDeviceBackend(device); };
}

class RankEngineTest : public ::testing::Test {
 protected:
  void MakeRanks(int32_t ep_size, const NewBackend& new_backend) {
    placement_.emplace(*Placement::Contiguous(kExperts, ep_size));
    std::vector<std::unique_ptr<Communicator>> communicators = NewInProcessCommunicators(ep_size);
    engines_.clear();
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      RankEngineOptions options;
      options.ep_rank = rank;
      options.ep_size = ep_size;
      options.backend = new_backend();
      engines_.push_back(std::make_unique<RankEngine>(std::move(options)));
      const absl::Status status = engines_[rank]->LoadLayer(*source_, source_->model().layers[1],
                                                            *placement_, [](int64_t) {});
      ASSERT_TRUE(status.ok()) << status;
      engines_[rank]->EnterEpoch(8, 9, std::move(communicators[rank]));
    }
  }

  // The plan of a step over all tokens.
  StepPlan Plan() {
    const RoutingSegment segment = routing_.Segment(0, kTokens);
    StepPlanParams params;
    params.header.incarnation = 8;
    params.header.epoch = 9;
    params.header.model = "m";
    params.header.layer = 2;
    params.header.activation_dtype = DType::kFloat32;
    params.header.combine_dtype = DType::kFloat16;
    params.header.output_dtype = DType::kBFloat16;
    params.header.include_shared_experts = true;
    params.segments = absl::MakeConstSpan(&segment, 1);
    params.placement = &*placement_;
    params.header.strategy = strategy_;
    params.max_num_tokens = kTokens;
    StepPlan plan = *PlanStep(params);
    if (strategy_ == DispatchMode::kAllGatherReduceScatterMonolithic) {
      MakePlanMonolithic(absl::MakeConstSpan(hidden_).subspan(0, kTokens * kExperts), plan);
    }
    return plan;
  }

  TokenShard Shard(const StepPlan& plan, int32_t rank) const {
    TokenShard shard;
    shard.rows = {{reinterpret_cast<const std::byte*>(hidden_.data()) +
                       plan.shard_offsets[rank] * kHidden * int64_t{sizeof(float)},
                   plan.slices[rank].num_source_tokens}};
    return shard;
  }

  // All ranks on a thread each; the outputs of all tokens.
  std::vector<std::byte> RunAll() {
    const StepPlan plan = Plan();
    std::vector<absl::StatusOr<RankStepResult>> results(engines_.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < engines_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        results[rank] = engines_[rank]->RunStep(plan.slices[rank],
                                                Shard(plan, static_cast<int32_t>(rank)), Soon());
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<std::byte> outputs;
    for (const absl::StatusOr<RankStepResult>& result : results) {
      EXPECT_TRUE(result.ok()) << result.status();
      if (!result.ok()) continue;
      const StepTimings& timings = result->timings;
      EXPECT_GE(timings.dispatch_micros, 0);
      EXPECT_GE(timings.compute_micros, 0);
      EXPECT_GE(timings.combine_micros, 0);
      outputs.insert(outputs.end(), result->output.rows,
                     result->output.rows + result->output.num_rows * kHidden * 2);
    }
    return outputs;
  }

  static absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

  static RandomRouting MakeRouting() {
    std::mt19937_64 random(4);
    return MakeRandomRouting(random, kTokens, 3, kExperts);
  }
  static std::vector<float> MakeHidden() {
    std::mt19937_64 random(5);
    std::normal_distribution<float> normal;
    std::vector<float> hidden(kTokens * kHidden);
    for (float& value : hidden) value = normal(random);
    return hidden;
  }

  const std::unique_ptr<SyntheticWeightSource> source_ = MakeSource();
  const RandomRouting routing_ = MakeRouting();
  const std::vector<float> hidden_ = MakeHidden();
  DispatchMode strategy_ = DispatchMode::kAuto;
  std::optional<Placement> placement_;
  std::vector<std::unique_ptr<RankEngine>> engines_;
};

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
