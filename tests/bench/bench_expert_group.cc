// What a step costs around its experts: tiny experts, few tokens, all ranks in this process.

#include <cstring>
#include <memory>
#include <vector>

#include "absl/time/clock.h"
#include "benchmark/benchmark.h"
#include "server/cluster/local_expert_group.h"
#include "server/model/synthetic_weight_source.h"

namespace expertmesh {
namespace {

constexpr int32_t kTopk = 8;
constexpr int32_t kExperts = 64;
constexpr int64_t kHidden = 128;

// Args: tokens, ranks, whether the caller runs all ranks.
void BM_Step(benchmark::State& state) {
  ModelSpec model;
  model.name = "bench";
  model.architecture = "Bench";
  model.hidden_size = kHidden;
  model.weight_dtype = DType::kBFloat16;
  LayerSpec layer;
  layer.num_experts = kExperts;
  layer.topk = kTopk;
  layer.intermediate_size = 32;
  model.layers.push_back(layer);
  const std::unique_ptr<SyntheticWeightSource> source = *SyntheticWeightSource::Create(model, 1);
  LocalExpertGroupOptions options;
  options.num_ranks = static_cast<int32_t>(state.range(1));
  const std::unique_ptr<LocalExpertGroup> group = *LocalExpertGroup::Create(options);
  const WeightSource* const sources[] = {source.get()};
  if (const absl::Status status = group->Load(sources); !status.ok()) {
    state.SkipWithError(status.ToString().c_str());
    return;
  }

  const int64_t num_tokens = state.range(0);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < num_tokens * kTopk; ++i) {
    ids.push_back(static_cast<int32_t>(i * 7 % kExperts));
  }
  const std::vector<float> weights(ids.size(), 0.125f);
  const std::vector<std::byte> hidden(num_tokens * kHidden * 2);
  const RoutingSegment segment{ids.data(), weights.data(), num_tokens, kTopk};
  StepPlanParams params;
  params.header.incarnation = group->incarnation();
  params.header.epoch = group->epoch();
  params.header.model = model.name;
  params.header.activation_dtype = DType::kBFloat16;
  params.header.combine_dtype = DType::kBFloat16;
  params.header.output_dtype = DType::kBFloat16;
  params.segments = absl::MakeConstSpan(&segment, 1);
  params.placement = group->placement(model.name, 0);
  for (auto _ : state) {
    GroupStep step;
    step.plan = *PlanStep(params);
    for (int32_t rank = 0; rank < group->ep_size(); ++rank) {
      const int64_t first = step.plan.shard_offsets[rank];
      step.shards.push_back(
          {{{hidden.data() + first * kHidden * 2, step.plan.shard_offsets[rank + 1] - first}}});
    }
    const absl::StatusOr<GroupStepResult> result =
        group->RunStep(std::move(step), state.range(2) != 0, absl::InfiniteFuture());
    if (!result.ok()) state.SkipWithError(result.status().ToString().c_str());
  }
}
BENCHMARK(BM_Step)
    ->ArgNames({"tokens", "ranks", "on_caller"})
    ->ArgsProduct({{1, 16}, {1, 2, 4}, {1}})
    ->Args({16, 2, 0})
    ->UseRealTime();

}  // namespace
}  // namespace expertmesh
