#include "client/cli/bench_load.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/flag_error.h"
#include "client/cli/wire_dtype.h"
#include "kernels/base/checked_math.h"

namespace expertmesh {
namespace {

absl::StatusOr<std::vector<const v1::LayerInfo*>> ChooseLayers(const v1::GetModelResponse& model,
                                                               const std::vector<int32_t>& wanted) {
  std::vector<const v1::LayerInfo*> layers;
  for (const v1::LayerInfo& layer : model.layers()) {
    if (wanted.empty()) layers.push_back(&layer);
  }
  for (const int32_t index : wanted) {
    const auto found =
        std::find_if(model.layers().begin(), model.layers().end(),
                     [&](const v1::LayerInfo& layer) { return layer.index() == index; });
    if (found == model.layers().end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", index, " of model ", model.model(), " has no experts"));
    }
    layers.push_back(&*found);
  }
  if (layers.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("model ", model.model(), " has no layer with experts"));
  }
  return layers;
}

}  // namespace

absl::StatusOr<RoutingSkew> RoutingSkewFromName(absl::string_view name) {
  if (name == "uniform") return RoutingSkew::kUniform;
  if (name == "zipf") return RoutingSkew::kZipf;
  if (name == "one_hot") return RoutingSkew::kOneHot;
  return FlagError(absl::StrCat("--skew is '", name, "'; it takes uniform, zipf or one_hot"));
}

ExpertDrawer::ExpertDrawer(int32_t num_experts, RoutingSkew skew, uint64_t seed)
    : skew_(skew), weights_(static_cast<size_t>(num_experts), 1.0), order_(weights_.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  if (skew != RoutingSkew::kZipf) return;
  for (size_t e = 0; e < weights_.size(); ++e) weights_[e] = 1.0 / static_cast<double>(e + 1);
  std::shuffle(order_.begin(), order_.end(), std::mt19937_64(seed));
}

void ExpertDrawer::Draw(int topk, std::mt19937_64& random, int32_t* ids) {
  remaining_ = weights_;
  size_t left = remaining_.size();
  for (int k = 0; k < topk; ++k, --left) {
    if (left == 0) {
      remaining_ = weights_;
      left = remaining_.size();
    }
    size_t chosen = 0;
    if (skew_ != RoutingSkew::kOneHot || k > 0) {
      chosen = std::discrete_distribution<size_t>(remaining_.begin(), remaining_.end())(random);
    }
    remaining_[chosen] = 0;
    ids[k] = order_[chosen];
  }
}

absl::StatusOr<std::vector<std::unique_ptr<ForwardJob>>> MakeBenchLoad(
    const v1::GetModelResponse& model, const BenchLoadOptions& options) {
  const auto layers = ChooseLayers(model, options.layers);
  if (!layers.ok()) return layers.status();
  const int64_t hidden_size = model.hidden_size();
  const auto size_bytes =
      CheckedSizeProduct({options.tokens_per_call, hidden_size, DTypeBytes(options.dtype)});
  if (options.tokens_per_call < 1 || options.num_requests < 1 || !size_bytes.has_value()) {
    return FlagError(absl::StrCat("--tokens=", options.tokens_per_call,
                                  " and --requests=", options.num_requests, " must be at least 1"));
  }
  std::mt19937_64 random(options.seed);
  std::normal_distribution<float> normal;
  std::vector<std::unique_ptr<ForwardJob>> load;
  for (int i = 0; i < options.num_requests; ++i) {
    const v1::LayerInfo& layer = *(*layers)[static_cast<size_t>(i) % layers->size()];
    const int topk = options.topk > 0 ? options.topk : layer.topk();
    auto job = std::make_unique<ForwardJob>();
    job->hidden_states.dtype = options.dtype;
    job->hidden_states.shape = {options.tokens_per_call, hidden_size};
    auto bytes = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(*size_bytes));
    for (int64_t e = 0; e < options.tokens_per_call * hidden_size; ++e) {
      StoreFloat(bytes->data(), options.dtype, e, normal(random));
    }
    job->hidden_states.data = *bytes;  // for --check
    ExpertDrawer drawer(layer.num_experts(), options.skew, options.seed);
    job->topk_ids.resize(static_cast<size_t>(options.tokens_per_call * topk));
    for (int64_t t = 0; t < options.tokens_per_call; ++t)
      drawer.Draw(topk, random, &job->topk_ids[static_cast<size_t>(t * topk)]);
    job->topk_weights.assign(job->topk_ids.size(), 1.0f / static_cast<float>(topk));
    ForwardInput& input = job->input;
    input.model = model.model();
    input.layer = layer.index();
    input.num_tokens = options.tokens_per_call;
    input.hidden_size = hidden_size;
    input.hidden_states = {bytes->data(), *size_bytes, WireDType(options.dtype), bytes};
    input.routing = TopKRouting{topk, job->topk_ids, job->topk_weights};
    load.push_back(std::move(job));
  }
  return load;
}

}  // namespace expertmesh
