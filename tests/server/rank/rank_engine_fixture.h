#ifndef EXPERTMESH_TESTS_SERVER_RANK_RANK_ENGINE_FIXTURE_H_
#define EXPERTMESH_TESTS_SERVER_RANK_RANK_ENGINE_FIXTURE_H_

#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/comm/in_process_communicator.h"
#include "server/model/synthetic_weight_source.h"
#include "server/planning/monolithic_plan.h"
#include "server/rank/rank_engine.h"
#include "tests/server/planning/random_routing.h"

namespace expertmesh {

inline constexpr int32_t kExperts = 6;
inline constexpr int64_t kHidden = 24;
inline constexpr int64_t kTokens = 21;

inline std::unique_ptr<SyntheticWeightSource> MakeSource() {
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

inline std::unique_ptr<RankBackend> NewHostBackend() {
  CpuRankBackendOptions options;
  options.threads.num_threads = 2;
  options.allocator = std::make_shared<HostBufferPool>(HostBufferPoolOptions{.poison_byte = 0xff});
  return *NewCpuRankBackend(options);
}

using NewBackend = std::function<std::unique_ptr<RankBackend>()>;

// A group of ranks in this process and one step over a random layer with shared experts.
class RankEngineFixture : public ::testing::Test {
 protected:
  void MakeRanks(int32_t ep_size, const NewBackend& new_backend) {
    placement_.emplace(*Placement::Contiguous(kExperts, ep_size));
    engines_.clear();
    std::vector<std::unique_ptr<RankBackend>> backends;
    for (int32_t rank = 0; rank < ep_size; ++rank) backends.push_back(new_backend());
    std::vector<std::unique_ptr<Communicator>> communicators =
        NewInProcessCommunicators(ep_size, backends.front()->copy_bytes());
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      RankEngineOptions options;
      options.ep_rank = rank;
      options.ep_size = ep_size;
      options.backend = std::move(backends[rank]);
      options.format = format_;
      engines_.push_back(std::make_unique<RankEngine>(std::move(options)));
      const absl::Status status = engines_[rank]->LoadLayer(*source_, source_->model().layers[1],
                                                            *placement_, [](int64_t) {});
      ASSERT_TRUE(status.ok()) << status;
      engines_[rank]->EnterEpoch(8, 9, std::move(communicators[rank]));
    }
  }

  // The plan of a step over all tokens.
  StepPlan Plan() {
    const RoutingSegment segment = routing_.Segment(0, num_tokens_);
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
  RandomRouting routing_ = MakeRouting();
  int64_t num_tokens_ = kTokens;  // of them, in a step
  const std::vector<float> hidden_ = MakeHidden();
  DispatchMode strategy_ = DispatchMode::kAuto;
  ActivationFormat format_ = ActivationFormat::kContiguous;
  std::optional<Placement> placement_;
  std::vector<std::unique_ptr<RankEngine>> engines_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_RANK_RANK_ENGINE_FIXTURE_H_
