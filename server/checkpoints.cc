#include "server/checkpoints.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/dtype.h"
#include "server/ops/logging.h"

namespace expertmesh {

std::string NamesOf(absl::Span<const ServedModel> models) {
  return absl::StrJoin(models, ", ", [](std::string* out, const ServedModel& model) {
    absl::StrAppend(out, model.spec.name);
  });
}

absl::StatusOr<std::vector<ServedModel>> OpenCheckpoints(
    absl::Span<const std::pair<std::string, std::string>> folders, const std::string& architecture,
    Fp8Weights fp8_weights) {
  std::vector<ServedModel> models;
  for (const auto& [name, folder] : folders) {
    absl::StatusOr<std::unique_ptr<CheckpointWeightSource>> source = CheckpointWeightSource::Open(
        folder, {.model_name = name, .architecture = architecture, .fp8_weights = fp8_weights});
    if (!source.ok()) return source.status();
    ServedModel model;
    model.spec = (*source)->model();
    model.source = *std::move(source);
    LogInfo("opened a checkpoint", {{"model", model.spec.name},
                                    {"architecture", model.spec.architecture},
                                    {"moe_layers", model.spec.layers.size()},
                                    {"hidden_size", model.spec.hidden_size},
                                    {"dtype", DTypeName(model.spec.weight_dtype)},
                                    {"path", folder}});
    models.push_back(std::move(model));
  }
  std::sort(models.begin(), models.end(),
            [](const ServedModel& a, const ServedModel& b) { return a.spec.name < b.spec.name; });
  for (size_t i = 1; i < models.size(); ++i) {
    if (models[i].spec.name == models[i - 1].spec.name) {
      return absl::InvalidArgumentError(
          absl::StrCat("two models are called '", models[i].spec.name, "'"));
    }
  }
  return models;
}

void TellOfDequantizedFp8(const ServedModel& model, int64_t bytes) {
  if (!model.source->dequantizes_fp8()) return;
  LogInfo("fp8 experts are dequantized to bfloat16, twice the memory that they take in the file",
          {{"model", model.spec.name}, {"bytes", bytes}});
}

LoadReporterOptions ProgressToStderr(bool on_terminal) {
  LoadReporterOptions options;
  options.is_terminal = on_terminal;
  options.write_terminal = [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
  };
  options.log = [](std::string_view message) { LogInfo(message); };
  return options;
}

}  // namespace expertmesh
