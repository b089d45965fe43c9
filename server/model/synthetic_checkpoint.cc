#include "server/model/synthetic_checkpoint.h"

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/model/checkpoint_planner.h"
#include "server/model/model_config.h"
#include "server/model/printable.h"
#include "server/model/safetensors_writer.h"
#include "server/model/synthetic_weight_source.h"

namespace expertmesh {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kSingleFile = "model.safetensors";
constexpr absl::string_view kIndexFile = "model.safetensors.index.json";
constexpr absl::string_view kConfigFile = "config.json";

// A file that a checkpoint directory has, ours or one that would shadow ours.
bool IsCheckpointFile(absl::string_view name) {
  return name == kConfigFile || name == kIndexFile || name == kSingleFile ||
         (absl::StartsWith(name, "model-") && absl::EndsWith(name, ".safetensors"));
}

absl::Status FsError(const std::string& path, absl::string_view action,
                     const std::error_code& error) {
  return absl::Status(absl::ErrnoToStatusCode(error.value()),
                      absl::StrCat("cannot ", action, " ", Printable(path), ": ", error.message()));
}

absl::Status PrepareDirectory(const std::string& directory, bool overwrite) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) return FsError(directory, "make directory", error);
  std::vector<fs::path> old_files;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (IsCheckpointFile(it->path().filename().string())) old_files.push_back(it->path());
  }
  if (error) return FsError(directory, "list directory", error);
  if (!old_files.empty() && !overwrite) {
    return absl::AlreadyExistsError(
        absl::StrCat("directory ", Printable(directory), " already holds a checkpoint (",
                     old_files[0].filename().string(), "): choose another one, or overwrite it"));
  }
  for (const fs::path& file : old_files) {
    fs::remove(file, error);
    if (error) return FsError(file.string(), "remove", error);
  }
  return absl::OkStatus();
}

absl::Status WriteText(const std::string& path, absl::string_view text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (file) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", Printable(path)));
}

using Shard = absl::Span<const PlannedTensor>;

// Runs of tensors of at most max_bytes, or of one larger tensor.
std::vector<Shard> SplitShards(const std::vector<PlannedTensor>& tensors, int64_t max_bytes) {
  std::vector<Shard> shards;
  size_t begin = 0;
  int64_t size_bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (max_bytes > 0 && i > begin && size_bytes + tensors[i].size_bytes > max_bytes) {
      shards.push_back(absl::MakeConstSpan(tensors).subspan(begin, i - begin));
      begin = i;
      size_bytes = 0;
    }
    size_bytes += tensors[i].size_bytes;
  }
  shards.push_back(absl::MakeConstSpan(tensors).subspan(begin));
  return shards;
}

absl::StatusOr<ModelConfig> MakeConfig(const SyntheticCheckpointOptions& options,
                                       const std::string& json) {
  const bool is_float8 = options.dtype == DType::kFloat8E4M3;
  if (!is_float8 && !IsActivationDType(options.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype is ", std::string(DTypeName(options.dtype)),
                     "; expected float32, float16, bfloat16 or float8_e4m3"));
  }
  absl::StatusOr<ModelConfig> config = ParseModelConfig(json);
  if (config.ok() && is_float8 && config->architecture.layout != ExpertLayout::kPerExpert) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype is float8_e4m3; architecture ", config->architecture.name,
                     " has fused experts, whose block scales are unknown"));
  }
  return config;
}

}  // namespace

absl::StatusOr<SyntheticCheckpointSummary> WriteSyntheticCheckpoint(
    const std::string& directory, const SyntheticCheckpointOptions& options,
    absl::FunctionRef<void(int64_t, int64_t)> progress) {
  const absl::StatusOr<std::string> config_json = SyntheticConfigJson(options);
  if (!config_json.ok()) return config_json.status();
  absl::StatusOr<ModelConfig> config = MakeConfig(options, *config_json);
  if (!config.ok()) return config.status();
  absl::StatusOr<std::shared_ptr<const SyntheticWeightSource>> source =
      SyntheticWeightSource::Create(config->spec, options.seed);
  if (!source.ok()) return source.status();
  CheckpointPlanner planner(*config, *source);
  const absl::StatusOr<std::vector<PlannedTensor>> tensors = planner.Plan();
  if (!tensors.ok()) return tensors.status();

  absl::Status status = PrepareDirectory(directory, options.overwrite);
  if (!status.ok()) return status;
  SyntheticCheckpointSummary summary;
  summary.model = (*source)->model();
  summary.num_tensors = static_cast<int64_t>(tensors->size());
  int64_t total_bytes = 0;
  for (const PlannedTensor& tensor : *tensors) total_bytes += tensor.size_bytes;

  const std::vector<Shard> shards = SplitShards(*tensors, options.max_shard_bytes);
  nlohmann::ordered_json weight_map = nlohmann::ordered_json::object();
  auto& entries = weight_map.get_ref<nlohmann::ordered_json::object_t&>();
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name =
        options.max_shard_bytes > 0
            ? absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, shards.size())
            : std::string(kSingleFile);
    std::vector<SafetensorsDeclaration> declarations;
    for (const PlannedTensor& tensor : shards[i]) {
      declarations.push_back(tensor.declaration);
      entries.emplace_back(tensor.declaration.name, name);
    }
    absl::StatusOr<std::unique_ptr<SafetensorsWriter>> writer = SafetensorsWriter::Create(
        absl::StrCat(directory, "/", name), declarations, {{"format", "pt"}});
    if (!writer.ok()) return writer.status();
    for (const PlannedTensor& tensor : shards[i]) {
      status = tensor.write(**writer);
      if (!status.ok()) return status;
      summary.size_bytes += tensor.size_bytes;
      progress(summary.size_bytes, total_bytes);
    }
    status = (*writer)->Finish();
    if (!status.ok()) return status;
    ++summary.num_files;
  }
  if (options.max_shard_bytes > 0) {
    nlohmann::ordered_json index;
    index["metadata"]["total_size"] = total_bytes;
    index["weight_map"] = std::move(weight_map);
    status = WriteText(absl::StrCat(directory, "/", kIndexFile), index.dump(2) + "\n");
    if (!status.ok()) return status;
  }
  status = WriteText(absl::StrCat(directory, "/", kConfigFile), *config_json);
  if (!status.ok()) return status;
  return summary;
}

}  // namespace expertmesh
