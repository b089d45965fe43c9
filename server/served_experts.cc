#include "server/served_experts.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "server/model/load_reporter.h"
#include "server/ops/logging.h"

namespace expertmesh {

absl::Status LoadRouters(absl::Span<const ServedModel> models, RouterTable* routers) {
  for (const ServedModel& model : models) {
    for (const LayerSpec& layer : model.spec.layers) {
      std::unique_ptr<LoadedGate> gate;
      if (layer.has_gate) {
        absl::StatusOr<LoadedGate> loaded = model.source->LoadGate(layer.index);
        if (!loaded.ok()) return loaded.status();
        gate = std::make_unique<LoadedGate>(*std::move(loaded));
      }
      absl::StatusOr<std::unique_ptr<Router>> router =
          NewRouter(model.spec, layer, std::move(gate));
      if (!router.ok()) return router.status();
      routers->Add(model.spec.name, *std::move(router));
    }
  }
  return absl::OkStatus();
}

absl::Status LoadExperts(absl::Span<const ServedModel> models, bool progress_on_terminal,
                         LocalExpertGroup* group) {
  std::vector<const WeightSource*> sources;
  for (const ServedModel& model : models) {
    sources.push_back(model.source.get());
    const absl::StatusOr<std::vector<int64_t>> bytes = group->NeedBytes({sources.back()});
    if (!bytes.ok()) return bytes.status();
    TellOfDequantizedFp8(model, std::accumulate(bytes->begin(), bytes->end(), int64_t{0}));
  }
  absl::StatusOr<std::vector<int64_t>> need = group->NeedBytes(sources);
  if (!need.ok()) return need.status();
  absl::StatusOr<int64_t> available = group->AvailableBytes();
  if (!available.ok()) return available.status();

  LoadReporter reporter(ProgressToStderr(progress_on_terminal), NamesOf(models));
  reporter.Start(std::accumulate(need->begin(), need->end(), int64_t{0}), *available);
  const absl::Status status = group->Load(
      sources,
      [&reporter](const LoadProgress& progress) {
        reporter.Update(progress.loaded_bytes, progress.total_bytes);
      },
      *available);
  reporter.Finish(status);
  return status;
}

void WarnOfEmptyRanks(absl::Span<const ServedModel> models, const ExpertGroup& group) {
  int32_t most = 0;
  for (const ServedModel& model : models) {
    for (const LayerSpec& layer : model.spec.layers) {
      const Placement* placement = group.placement(model.spec.name, layer.index);
      int32_t num_empty = 0;
      for (int32_t rank = 0; rank < group.ep_size(); ++rank) {
        num_empty += placement->local_experts(rank).empty();
      }
      most = std::max(most, num_empty);
    }
  }
  if (most == 0) return;
  LogWarning("there are more ranks than a layer has experts: some hold none of it and idle",
             {{"ranks", group.ep_size()}, {"idle", most}});
}

void FillLocalRankStatus(absl::Span<const ServedModel> models, const LocalExpertGroup& group,
                         bool loaded, v1::GetStatusResponse* response) {
  for (int32_t rank = 0; rank < group.ep_size(); ++rank) {
    v1::RankStatus* out = response->add_ranks();
    out->set_ep_rank(rank);
    out->set_address("in-process");
    out->set_state(loaded ? v1::RANK_STATE_ACTIVE : v1::RANK_STATE_LOADING);
    out->set_instruction_set(group.instruction_set());
    if (!loaded) continue;
    out->set_load_progress(1);
    out->set_weight_bytes(group.weight_bytes()[rank]);
    for (const ServedModel& model : models) {
      for (const LayerSpec& layer : model.spec.layers) {
        const Placement* placement = group.placement(model.spec.name, layer.index);
        const auto num_experts = static_cast<int64_t>(placement->local_experts(rank).size());
        out->set_num_experts(out->num_experts() + num_experts);
      }
    }
  }
}

}  // namespace expertmesh
