#include "server/rank/rank_engine.h"

#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rank/rank_step.h"

namespace expertmesh {
namespace {

absl::StatusOr<std::unique_ptr<Router>> LoadRule(const WeightSource& source,
                                                 const LayerSpec& layer) {
  std::unique_ptr<LoadedGate> gate;
  if (layer.has_gate && layer.router.has_correction_bias) {
    absl::StatusOr<LoadedGate> loaded = source.LoadGate(layer.index);
    if (!loaded.ok()) return loaded.status();
    gate = std::make_unique<LoadedGate>();
    gate->correction_bias = std::move(loaded->correction_bias);
  }
  return NewRouter(source.model(), layer, std::move(gate));
}

}  // namespace

RankEngine::RankEngine(RankEngineOptions options)
    : options_(std::move(options)),
      device_arenas_(options_.backend->device_allocator().get()),
      expert_arenas_(options_.backend->device_allocator().get()),
      host_arenas_(options_.backend->host_allocator().get()) {}

RankEngine::~RankEngine() = default;

absl::Status RankEngine::LoadLayer(const WeightSource& source, const LayerSpec& layer_spec,
                                   const Placement& placement,
                                   absl::FunctionRef<void(int64_t num_bytes)> progress) {
  const ModelSpec& model = source.model();
  if (FindLayer(model.name, layer_spec.index) != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat("rank ", ep_rank(), " holds layer ",
                                                 layer_spec.index, " of model ", model.name));
  }
  if (placement.ep_size() != ep_size() || placement.num_experts() != layer_spec.num_experts) {
    return absl::InvalidArgumentError(
        absl::StrCat("placement: of ", placement.num_experts(), " experts on ", placement.ep_size(),
                     " ranks, not of ", layer_spec.num_experts, " on ", ep_size()));
  }
  const absl::Span<const int32_t> local_experts = placement.local_experts(ep_rank());
  Layer layer;
  layer.num_local_experts = static_cast<int32_t>(local_experts.size());
  layer.hidden_size = model.hidden_size;
  layer.placement = placement;
  absl::StatusOr<std::unique_ptr<Router>> router = LoadRule(source, layer_spec);
  if (!router.ok()) return router.status();
  layer.router = *std::move(router);
  if (!local_experts.empty()) {
    absl::StatusOr<std::unique_ptr<ExpertKernels>> kernels = backend().NewExpertKernels(
        MakeExpertLayerShape(model, layer.num_local_experts, layer_spec.intermediate_size));
    if (!kernels.ok()) return kernels.status();
    layer.kernels = *std::move(kernels);
  }

  const auto load_expert = [&](int64_t local_expert_id) {
    absl::StatusOr<LoadedExpert> expert =
        source.LoadExpert(layer_spec.index, local_experts[local_expert_id]);
    if (!expert.ok()) return expert.status();
    return layer.kernels->LoadExpert(static_cast<int32_t>(local_expert_id), expert->weights);
  };
  const auto load_shared = [&] {
    absl::StatusOr<std::unique_ptr<SharedExperts>> shared =
        SharedExperts::Load(source, layer_spec, backend());
    if (!shared.ok()) return shared.status();
    layer.shared = *std::move(shared);
    return absl::OkStatus();
  };
  const bool has_shared = layer_spec.shared_intermediate_size > 0;
  const int64_t expert_bytes = ExpertWeightBytes(model, layer_spec);
  const int64_t shared_bytes = SharedExpertWeightBytes(model, layer_spec);
  std::mutex mutex;
  absl::Status first_error;
  // The shared experts come last.
  backend().ForEachLoad(layer.num_local_experts + has_shared, [&](int64_t i) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!first_error.ok()) return;
    }
    const bool is_shared = i == layer.num_local_experts;
    const absl::Status status = is_shared ? load_shared() : load_expert(i);
    if (!status.ok()) {
      const std::lock_guard<std::mutex> lock(mutex);
      first_error.Update(status);
      return;
    }
    progress(is_shared ? shared_bytes : expert_bytes);
  });
  if (!first_error.ok()) return first_error;
  models_[model.name][layer_spec.index] = std::move(layer);
  return absl::OkStatus();
}

int64_t RankEngine::weight_bytes() const {
  int64_t total = 0;
  for (const auto& [model, layers] : models_) {
    for (const auto& [index, layer] : layers) {
      if (layer.kernels != nullptr) total += layer.kernels->weight_bytes();
      if (layer.shared != nullptr) total += layer.shared->weight_bytes();
    }
  }
  return total;
}

std::unique_ptr<Communicator> RankEngine::EnterEpoch(uint64_t incarnation, uint64_t epoch,
                                                     std::unique_ptr<Communicator> communicator) {
  incarnation_ = incarnation;
  epoch_ = epoch;
  communicator_.swap(communicator);
  const std::lock_guard<std::mutex> lock(traffic_mutex_);
  taken_ = RankTraffic();
  if (communicator_ != nullptr) {
    // What connected the ranks is no step's.
    taken_.bytes_sent = communicator_->bytes_sent();
    taken_.wait_nanos = communicator_->wait_nanos();
  }
  return communicator;
}

void RankEngine::Abort(const absl::Status& reason) {
  if (communicator_ != nullptr) communicator_->Abort(reason);
}

void RankEngine::Break(const absl::Status& reason) {
  if (communicator_ != nullptr) communicator_->Break(reason);
}

absl::StatusOr<std::unique_ptr<RankStep>> RankEngine::Begin(StepSlice slice, TokenShard shard) {
  if (slice.header.incarnation != incarnation_ || slice.header.epoch != epoch_) {
    return absl::UnavailableError(absl::StrCat(
        "slice: of incarnation ", slice.header.incarnation, " epoch ", slice.header.epoch,
        ", rank ", ep_rank(), " is in incarnation ", incarnation_, " epoch ", epoch_));
  }
  std::unique_ptr<RankStep> step(new RankStep(*this, std::move(slice), std::move(shard)));
  if (absl::Status status = step->Keep(step->Begin()); !status.ok()) return status;
  return step;
}

void RankEngine::SkipOrder(uint64_t incarnation, uint64_t epoch, int64_t order) {
  if (incarnation != incarnation_ || epoch != epoch_ || communicator_ == nullptr) return;
  communicator_->CloseOrder(order);
}

absl::StatusOr<RankStepResult> RankEngine::RunStep(StepSlice slice, TokenShard shard,
                                                   absl::Time deadline, ComputeTurns::Turn turn) {
  // Where the rank routes it must have everybody's rows before it knows its own.
  const bool waits_for_rows =
      slice.header.dispatch_order >= 0 ||
      slice.header.strategy == DispatchMode::kAllGatherReduceScatterMonolithic;
  absl::StatusOr<std::unique_ptr<RankStep>> step = Begin(std::move(slice), std::move(shard));
  if (!step.ok()) return step.status();
  absl::Status status =
      waits_for_rows ? (*step)->ComputeInTurn(std::move(turn), deadline) : (*step)->Compute();
  if (!status.ok()) return status;
  return (*step)->Finish(deadline);
}

RankTraffic RankEngine::TakeTraffic() {
  RankTraffic traffic;
  if (communicator_ == nullptr) return traffic;
  const std::lock_guard<std::mutex> lock(traffic_mutex_);
  const auto take = [](std::vector<int64_t> now, std::vector<int64_t>* before) {
    before->resize(now.size());
    for (size_t peer = 0; peer < now.size(); ++peer) {
      const int64_t sum = now[peer];
      now[peer] -= (*before)[peer];
      (*before)[peer] = sum;
    }
    return now;
  };
  traffic.bytes_sent = take(communicator_->bytes_sent(), &taken_.bytes_sent);
  traffic.wait_nanos = take(communicator_->wait_nanos(), &taken_.wait_nanos);
  return traffic;
}

const RankEngine::Layer* RankEngine::FindLayer(const std::string& model, int32_t layer) const {
  const auto layers = models_.find(model);
  if (layers == models_.end()) return nullptr;
  const auto found = layers->second.find(layer);
  return found == layers->second.end() ? nullptr : &found->second;
}

}  // namespace expertmesh
