// Time of PlanStep, slices included, per (token, k) pair.

#include <malloc.h>

#include <random>
#include <vector>

#include "benchmark/benchmark.h"
#include "server/planning/step_plan.h"

namespace expertmesh {
namespace {

constexpr int32_t kTopk = 8;
constexpr int32_t kExperts = 256;

// As the server's main does: without it every plan pays for fresh pages.
const bool kMallocSet = [] {
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  mallopt(M_TOP_PAD, 64 << 20);
  return true;
}();

// Args: tokens, ranks, combine mode, whether with a fixed capacity.
void BM_PlanStep(benchmark::State& state) {
  const int64_t num_tokens = state.range(0);
  std::mt19937_64 random(1);
  std::vector<int32_t> ids;
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::vector<bool> used(kExperts);
    for (int32_t k = 0; k < kTopk;) {
      const auto id = static_cast<int32_t>(random() % kExperts);
      if (used[id]) continue;
      used[id] = true;
      ids.push_back(id);
      ++k;
    }
  }
  const std::vector<float> weights(ids.size(), 0.125f);
  const RoutingSegment segment{ids.data(), weights.data(), num_tokens, kTopk};
  const absl::StatusOr<Placement> placement =
      Placement::Contiguous(kExperts, static_cast<int32_t>(state.range(1)));
  StepPlanParams params;
  params.header.combine = static_cast<CombineMode>(state.range(2));
  params.segments = absl::MakeConstSpan(&segment, 1);
  params.placement = &*placement;
  if (state.range(3) != 0) {
    params.header.strategy = DispatchMode::kAllToAllFixedCapacity;
    params.max_num_tokens = num_tokens;
  }
  for (auto _ : state) {
    absl::StatusOr<StepPlan> plan = PlanStep(params);
    benchmark::DoNotOptimize(plan->slices.data());
  }
  const double pairs = static_cast<double>(num_tokens) * kTopk;
  state.counters["pairs/s"] =
      benchmark::Counter(pairs, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["s/pair"] = benchmark::Counter(
      pairs, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_PlanStep)
    ->ArgNames({"tokens", "ranks", "per_expert", "slots"})
    ->Args({1, 2, 0, 0})
    ->Args({64, 8, 0, 0})
    ->ArgsProduct({{4096}, {8, 64}, {0}, {1}})
    ->ArgsProduct({{4096, 65536}, {1, 8, 16, 64}, {0, 1}, {0}});

}  // namespace
}  // namespace expertmesh
