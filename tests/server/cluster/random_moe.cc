#include "tests/server/cluster/random_moe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "kernels/base/steady_now.h"
#include "server/model/synthetic_weight_source.h"
#include "tests/kernels/cpu/random_layer.h"

namespace expertmesh {
namespace {

constexpr int32_t kLayer = 3;

void AppendMatrix(const WeightMatrix& matrix, DType dtype, int64_t num_rows, int64_t num_columns,
                  std::vector<double>* values) {
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t column = 0; column < num_columns; ++column) {
      values->push_back(static_cast<double>(
          LoadFloat(matrix.data, dtype, row * matrix.row_stride + column * matrix.col_stride)));
    }
  }
}

ModelSpec MakeSpec(const RandomMoeShape& shape) {
  ModelSpec model;
  model.name = "random";
  model.architecture = "RandomForCausalLM";
  model.hidden_size = shape.hidden_size;
  model.weight_dtype = shape.weight_dtype;
  model.activation = shape.activation;
  LayerSpec layer;
  layer.index = kLayer;
  layer.num_experts = shape.num_experts;
  layer.topk = std::min(shape.topk, shape.num_experts);
  layer.intermediate_size = shape.intermediate_size;
  layer.shared_intermediate_size = shape.shared_intermediate_size;
  layer.shared_gated = shape.shared_gated;
  model.layers.push_back(layer);
  return model;
}

ReferenceActivation ReferenceActivationOf(Activation activation) {
  switch (activation) {
    case Activation::kSiluMul:
      return ReferenceActivation::kSiluMul;
    case Activation::kGeluMul:
      return ReferenceActivation::kGeluMul;
    case Activation::kClampedSwiGlu:
      return ReferenceActivation::kClampedSwiglu;
  }
  return ReferenceActivation::kSiluMul;
}

// Adds the shared experts' output to `expected` and what may be wrong with it to `bound`. The
// routed part's bound has the rounding of that part, so here it is the shared part's alone.
void AddShared(const RandomMoe& moe, const std::vector<double>& hidden, ReferenceErrorModel model,
               std::vector<double>* expected, std::vector<double>* bound) {
  const std::vector<double> shared = ReferenceExpertFfn(moe.shared_reference, 0, hidden);
  const int64_t hidden_size = moe.shape.hidden_size;
  const int64_t num_tokens = static_cast<int64_t>(hidden.size()) / hidden_size;
  model.weighted_input = ReferenceRounding::kNone;
  model.partial = ReferenceRounding::kNone;
  const std::vector<double> shared_bound =
      ReferenceErrorBound(moe.shared_reference, hidden, std::vector<int32_t>(num_tokens, 0),
                          std::vector<double>(num_tokens, 1.0), 1, model);
  for (int64_t token = 0; token < num_tokens; ++token) {
    double scale = 1, scale_error = 0;
    if (!moe.shared_gate.empty()) {
      double logit = 0, magnitude = 0;
      for (int64_t i = 0; i < hidden_size; ++i) {
        const double term = moe.shared_gate[i] * hidden[token * hidden_size + i];
        logit += term;
        magnitude += std::abs(term);
      }
      scale = 1 / (1 + std::exp(-logit));
      scale_error = scale * (0x1p-21 + (1 - scale) * 0x1p-22 * magnitude);
    }
    for (int64_t i = token * hidden_size; i < (token + 1) * hidden_size; ++i) {
      (*expected)[i] += scale * shared[i];
      (*bound)[i] += (scale + scale_error) * shared_bound[i] + scale_error * std::abs(shared[i]) +
                     0x1p-23 * std::abs((*expected)[i]);
      if (model.output == ReferenceRounding::kFloat16) (*bound)[i] += 0x1p-24;
    }
  }
}

}  // namespace

RandomMoe::RandomMoe(const RandomMoeShape& moe_shape, uint64_t seed) : shape(moe_shape) {
  absl::StatusOr<std::unique_ptr<SyntheticWeightSource>> created =
      SyntheticWeightSource::Create(MakeSpec(shape), seed);
  if (!created.ok()) {
    ADD_FAILURE() << created.status();
    return;
  }
  source = *std::move(created);
  const ModelSpec& model = source->model();
  reference.num_experts = shape.num_experts;
  reference.hidden_size = shape.hidden_size;
  reference.intermediate_size = shape.intermediate_size;
  reference.activation = ReferenceActivationOf(shape.activation);
  reference.swiglu_alpha = static_cast<double>(model.swiglu_alpha);
  reference.swiglu_limit = static_cast<double>(model.swiglu_limit);
  for (int32_t expert = 0; expert < shape.num_experts; ++expert) {
    const LoadedExpert loaded = *source->LoadExpert(kLayer, expert);
    const ExpertWeights& weights = loaded.weights;
    const int64_t hidden = shape.hidden_size;
    const int64_t intermediate = shape.intermediate_size;
    AppendMatrix(weights.gate, shape.weight_dtype, intermediate, hidden, &reference.w13);
    AppendMatrix(weights.up, shape.weight_dtype, intermediate, hidden, &reference.w13);
    AppendMatrix(weights.down, shape.weight_dtype, hidden, intermediate, &reference.w2);
    if (weights.gate_bias == nullptr) continue;
    std::vector<double>& w13_bias = reference.w13_bias;
    w13_bias.insert(w13_bias.end(), weights.gate_bias, weights.gate_bias + intermediate);
    w13_bias.insert(w13_bias.end(), weights.up_bias, weights.up_bias + intermediate);
    reference.w2_bias.insert(reference.w2_bias.end(), weights.down_bias,
                             weights.down_bias + hidden);
  }
  if (shape.shared_intermediate_size == 0) return;
  const LoadedSharedExperts shared = *source->LoadSharedExperts(kLayer);
  shared_reference.num_experts = 1;
  shared_reference.hidden_size = shape.hidden_size;
  shared_reference.intermediate_size = shape.shared_intermediate_size;
  shared_reference.activation = reference.activation;
  shared_reference.swiglu_alpha = reference.swiglu_alpha;
  shared_reference.swiglu_limit = reference.swiglu_limit;
  for (const WeightMatrix& matrix : {shared.weights.gate, shared.weights.up}) {
    AppendMatrix(matrix, shape.weight_dtype, shape.shared_intermediate_size, shape.hidden_size,
                 &shared_reference.w13);
  }
  AppendMatrix(shared.weights.down, shape.weight_dtype, shape.hidden_size,
               shape.shared_intermediate_size, &shared_reference.w2);
  EXPECT_EQ(shared.weights.down_bias, nullptr);
  shared_gate.assign(shared.gate.begin(), shared.gate.end());
}

std::shared_ptr<Allocator> PoisonedMemory() {
  HostBufferPoolOptions options;
  options.poison_byte = 0xff;
  return std::make_shared<HostBufferPool>(options);
}

std::unique_ptr<LocalExpertGroup> LoadGroup(const RandomMoe& moe, LocalExpertGroupOptions options) {
  if (options.allocator == nullptr) options.allocator = PoisonedMemory();
  absl::StatusOr<std::unique_ptr<LocalExpertGroup>> group = LocalExpertGroup::Create(options);
  if (!group.ok()) {
    ADD_FAILURE() << group.status();
    return nullptr;
  }
  const WeightSource* source = moe.source.get();
  const absl::Status loaded = (*group)->Load(absl::MakeConstSpan(&source, 1));
  EXPECT_TRUE(loaded.ok()) << loaded;
  return *std::move(group);
}

RandomTokens::RandomTokens(const RandomMoe& moe, int64_t num_random_tokens, DType dtype,
                           uint64_t seed)
    : activation_dtype(dtype) {
  std::mt19937_64 random(seed);
  routing = MakeRandomRouting(random, num_random_tokens, moe.shape.topk, moe.shape.num_experts);
  const int64_t hidden_size = moe.shape.hidden_size;
  hidden_values = RandomValues(random, num_random_tokens * hidden_size, 1.0, dtype);
  for (int64_t token = 0; token < num_random_tokens; ++token) {
    if (moe.shape.shared_intermediate_size > 0) break;
    const int32_t* ids = routing.topk_ids.data() + token * routing.topk;
    if (std::any_of(ids, ids + routing.topk, [](int32_t id) { return id >= 0; })) continue;
    std::fill_n(hidden_values.begin() + token * hidden_size, hidden_size,
                std::numeric_limits<double>::quiet_NaN());
  }
  hidden.push_back(std::byte{0});
  const std::vector<std::byte> bytes = ToBytes(hidden_values, dtype);
  hidden.insert(hidden.end(), bytes.begin(), bytes.end());
}

absl::StatusOr<GroupStep> MakeStep(ExpertGroup& group, const RandomMoe& moe,
                                   const RandomTokens& tokens, const StepChoices& choices,
                                   std::vector<std::vector<std::byte>>* memory) {
  std::vector<int64_t> order = choices.tokens;
  if (order.empty()) {
    order.resize(tokens.num_tokens());
    std::iota(order.begin(), order.end(), 0);
  }
  // One segment and one buffer per token.
  const int64_t row_bytes = moe.shape.hidden_size * DTypeBytes(tokens.activation_dtype);
  std::vector<RoutingSegment> segments;
  memory->clear();
  for (const int64_t token : order) {
    segments.push_back(tokens.routing.Segment(token, 1));
    const std::byte* row = tokens.hidden.data() + 1 + token * row_bytes;
    memory->emplace_back(1, std::byte{0});
    memory->back().insert(memory->back().end(), row, row + row_bytes);
  }

  StepPlanParams params;
  params.header.incarnation = group.incarnation();
  params.header.epoch = group.epoch();
  params.header.step = 7;
  params.header.model = moe.source->model().name;
  params.header.layer = kLayer;
  params.header.strategy = choices.strategy;
  params.header.combine = choices.combine;
  params.header.activation_dtype = tokens.activation_dtype;
  params.header.combine_dtype = choices.combine_dtype;
  params.header.output_dtype = choices.output_dtype;
  params.header.apply_router_weight_on_input = choices.weight_on_input;
  params.header.include_shared_experts = choices.include_shared_experts;
  params.segments = segments;
  params.placement = group.placement(moe.source->model().name, kLayer);
  params.shard_sizes = choices.shard_sizes;
  params.max_num_tokens = choices.max_num_tokens;
  if (params.max_num_tokens == 0) {
    const auto& sizes = choices.shard_sizes;
    params.max_num_tokens = std::max<int64_t>(
        1, sizes.empty()
               ? (static_cast<int64_t>(order.size()) + group.ep_size() - 1) / group.ep_size()
               : *std::max_element(sizes.begin(), sizes.end()));
  }
  absl::StatusOr<StepPlan> plan = PlanStep(params);
  if (!plan.ok()) return plan.status();

  GroupStep step;
  step.plan = *std::move(plan);
  step.shards.resize(group.ep_size());
  for (int32_t rank = 0; rank < group.ep_size(); ++rank) {
    for (int64_t i = step.plan.shard_offsets[rank]; i < step.plan.shard_offsets[rank + 1]; ++i) {
      step.shards[rank].rows.push_back({(*memory)[i].data() + 1, 1});
    }
  }
  return step;
}

absl::StatusOr<std::vector<std::vector<std::byte>>> RunTokens(ExpertGroup& group,
                                                              const RandomMoe& moe,
                                                              const RandomTokens& tokens,
                                                              const StepChoices& choices) {
  std::vector<std::vector<std::byte>> memory;
  absl::StatusOr<GroupStep> step = MakeStep(group, moe, tokens, choices, &memory);
  if (!step.ok()) return step.status();
  absl::StatusOr<GroupStepResult> result =
      group.RunStep(*std::move(step), choices.on_caller, SteadyNow() + absl::Seconds(100));
  if (!result.ok()) return result.status();
  std::vector<std::vector<std::byte>> outputs;
  const int64_t row_bytes = moe.shape.hidden_size * DTypeBytes(choices.output_dtype);
  for (const ShardOutput& shard : result->shards) {
    for (int64_t row = 0; row < shard.num_rows; ++row) {
      outputs.emplace_back(shard.rows + row * row_bytes, shard.rows + (row + 1) * row_bytes);
    }
  }
  EXPECT_EQ(outputs.size(), memory.size());
  return outputs;
}

void ExpectNearReference(const RandomMoe& moe, const RandomTokens& tokens,
                         const StepChoices& choices,
                         const std::vector<std::vector<std::byte>>& outputs) {
  const std::vector<double> weights(tokens.routing.topk_weights.begin(),
                                    tokens.routing.topk_weights.end());
  ReferenceForwardOptions options;
  options.apply_router_weight_on_input = choices.weight_on_input;
  std::vector<double> expected =
      ReferenceForward(moe.reference, tokens.hidden_values, tokens.routing.topk_ids, weights,
                       tokens.routing.topk, options);
  ReferenceErrorModel model;
  model.weighted_input = RoundingOf(tokens.activation_dtype);
  model.intermediate = RoundingOf(tokens.activation_dtype);
  model.partial = RoundingOf(choices.combine_dtype);
  model.output = RoundingOf(choices.output_dtype);
  std::vector<double> bound =
      ReferenceErrorBound(moe.reference, tokens.hidden_values, tokens.routing.topk_ids, weights,
                          tokens.routing.topk, model, choices.weight_on_input);
  if (choices.include_shared_experts) {
    AddShared(moe, tokens.hidden_values, model, &expected, &bound);
  }
  // What one partial in float16 can lose by underflow.
  const double slack =
      choices.combine_dtype == DType::kFloat16 ? 0x1p-25 * (1 + tokens.routing.topk) : 0.0;
  ASSERT_EQ(static_cast<int64_t>(outputs.size()), tokens.num_tokens());
  const int64_t hidden_size = moe.shape.hidden_size;
  for (int64_t token = 0; token < tokens.num_tokens(); ++token) {
    for (int64_t column = 0; column < hidden_size; ++column) {
      const auto actual =
          static_cast<double>(LoadFloat(outputs[token].data(), choices.output_dtype, column));
      const int64_t index = token * hidden_size + column;
      // Written so that a NaN fails.
      if (std::abs(actual - expected[index]) <= bound[index] + slack) continue;
      FAIL() << "token " << token << " column " << column << ": " << actual << ", reference "
             << expected[index] << " +- " << bound[index] + slack;
    }
  }
}

}  // namespace expertmesh
