#include "tests/gpu/bench_rank_step.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/steady_now.h"
#include "kernels/cuda/cuda_device.h"
#include "server/model/placement.h"
#include "server/model/synthetic_weight_source.h"
#include "server/planning/step_plan.h"
#include "server/rank/rank_engine.h"
#include "tests/gpu/routed_experts.h"

namespace expertmesh {
namespace {

void Check(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  std::exit(1);
}

template <class T>
T Need(absl::StatusOr<T> value, const char* what) {
  Check(value.status(), what);
  return *std::move(value);
}

// The one rank of a group.
std::unique_ptr<RankEngine> MakeRank(const RankStepShape& shape,
                                     const std::shared_ptr<CudaDevice>& device,
                                     const Placement& placement) {
  ModelSpec model;
  model.name = "m";
  model.architecture = "BenchForCausalLM";
  model.hidden_size = shape.hidden_size;
  model.weight_dtype = DType::kBFloat16;
  LayerSpec layer;
  layer.num_experts = shape.num_experts;
  layer.topk = shape.topk;
  layer.intermediate_size = shape.intermediate_size;
  model.layers.push_back(layer);
  const auto source = Need(SyntheticWeightSource::Create(std::move(model), 3), "a model");
  ParallelForOptions threads;
  threads.num_threads = 4;
  RankEngineOptions options;
  options.backend = NewCudaRankBackend(device, threads);
  auto engine = std::make_unique<RankEngine>(std::move(options));
  Check(engine->LoadLayer(*source, layer, placement, [](int64_t) {}), "LoadLayer");
  engine->EnterEpoch(1, 1, nullptr);
  return engine;
}

StepSlice MakeSlice(const RankStepShape& shape, const Placement& placement) {
  const std::vector<int32_t> ids = RoutedExperts(shape.num_experts, shape.num_tokens, shape.topk);
  const std::vector<float> weights(ids.size(), 1.0f / static_cast<float>(shape.topk));
  const RoutingSegment segment = {ids.data(), weights.data(), shape.num_tokens, shape.topk};
  StepPlanParams params;
  params.header.incarnation = 1;
  params.header.epoch = 1;
  params.header.model = "m";
  params.header.activation_dtype = DType::kBFloat16;
  params.header.combine_dtype = DType::kBFloat16;
  params.header.output_dtype = DType::kBFloat16;
  params.header.strategy = DispatchMode::kPassthrough;
  params.segments = absl::MakeConstSpan(&segment, 1);
  params.placement = &placement;
  params.max_num_tokens = shape.num_tokens;
  return std::move(Need(PlanStep(params), "PlanStep").slices[0]);
}

}  // namespace

void BenchRankStep(const BenchContext& context, const RankStepShape& shape) {
  const std::shared_ptr<CudaDevice> device = Need(OpenCudaDevice(0), "OpenCudaDevice");
  const Placement placement = Need(Placement::Contiguous(shape.num_experts, 1), "a placement");
  const std::unique_ptr<RankEngine> engine = MakeRank(shape, device, placement);
  const StepSlice slice = MakeSlice(shape, placement);
  // Where a request's payload is received.
  const Buffer hidden =
      Need(device->pinned_allocator()->Allocate(shape.num_tokens * shape.hidden_size * 2),
           "pinned memory");
  for (int64_t i = 0; i < shape.num_tokens * shape.hidden_size; ++i) {
    StoreFloat(hidden.data(), DType::kBFloat16, i, static_cast<float>(i % 17) / 16 - 0.5f);
  }
  std::vector<double> seconds;
  for (int i = 0; i < shape.num_steps; ++i) {
    StepSlice own = slice;  // as the rank gets it: by a move
    TokenShard shard;
    shard.rows = {{hidden.data(), shape.num_tokens}};
    const auto begin = std::chrono::steady_clock::now();
    const absl::StatusOr<RankStepResult> result =
        engine->RunStep(std::move(own), std::move(shard), SteadyNow() + absl::Minutes(1));
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    Check(result.status(), "a step");
    seconds.push_back(taken.count());
  }
  std::sort(seconds.begin(), seconds.end());
  const double step = seconds[seconds.size() / 2];
  const std::string name =
      "rank step T=" + std::to_string(shape.num_tokens) +
      " H=" + std::to_string(shape.hidden_size) + " I=" + std::to_string(shape.intermediate_size) +
      " E=" + std::to_string(shape.num_experts) + " k=" + std::to_string(shape.topk) + " bf16";
  context.table->Add({.name = name + ", whole", .value = step * 1e6, .unit = "us"});
  if (context.step_kernel_seconds <= 0) return;
  context.table->Add(
      {.name = name + ", kernels", .value = context.step_kernel_seconds * 1e6, .unit = "us"});
  context.table->Add({.name = name + ", outside kernels",
                      .value = (step - context.step_kernel_seconds) * 1e6,
                      .unit = "us",
                      .limit = 60,
                      .limit_name = "us to stay below"});
}

}  // namespace expertmesh
