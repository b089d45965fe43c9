#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
#include "client/cli/flag_error.h"
#include "kernels/base/checked_math.h"
#include "kernels/base/dtype.h"
#include "server/model/synthetic_checkpoint.h"

ABSL_FLAG(std::string, out, "", "directory to write the checkpoint to");
ABSL_FLAG(std::string, architecture, "Qwen3MoeForCausalLM", "whose names and layout to write");
ABSL_FLAG(int64_t, hidden_size, 256, "columns of hidden states");
ABSL_FLAG(int64_t, intermediate_size, 128, "columns between an expert's two matrix products");
ABSL_FLAG(int, num_layers, 2, "layers, all of them with experts");
ABSL_FLAG(int, num_experts, 16, "experts per layer");
ABSL_FLAG(int, experts_per_token, 4, "the router rule's top-k");
ABSL_FLAG(std::string, weight_dtype, "bfloat16", "float32, float16, bfloat16 or float8_e4m3");
ABSL_FLAG(uint64_t, weight_seed, 0, "of the weights");
ABSL_FLAG(int64_t, shard_bytes, 0,
          "write several files of about this size and an index; 0: one file");
ABSL_FLAG(bool, overwrite, false, "replace a checkpoint that is there already");

namespace expertmesh {
namespace {

// Before gigabytes are written, or a list of all tensors is made.
absl::Status CheckDiskSpace(const std::string& directory,
                            const SyntheticCheckpointOptions& options) {
  const auto need =
      CheckedSizeProduct({options.num_layers, options.num_experts, 3, options.hidden_size,
                          options.intermediate_size, DTypeBytes(options.dtype)});
  std::filesystem::path existing = std::filesystem::absolute(directory);
  std::error_code error;
  while (!std::filesystem::exists(existing, error) && existing.has_relative_path())
    existing = existing.parent_path();
  const std::filesystem::space_info space = std::filesystem::space(existing, error);
  if (error || (need.has_value() && static_cast<uint64_t>(*need) <= space.available))
    return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the experts of this checkpoint take ",
                   need.has_value() ? absl::StrCat(*need) : "more than 2^63", " bytes; ",
                   existing.string(), " has ", space.available));
}

absl::Status Run(const std::vector<std::string>& /*given*/) {
  SyntheticCheckpointOptions options;
  options.architecture = absl::GetFlag(FLAGS_architecture);
  options.hidden_size = absl::GetFlag(FLAGS_hidden_size);
  options.intermediate_size = absl::GetFlag(FLAGS_intermediate_size);
  options.num_layers = absl::GetFlag(FLAGS_num_layers);
  options.num_experts = absl::GetFlag(FLAGS_num_experts);
  options.topk = absl::GetFlag(FLAGS_experts_per_token);
  options.seed = absl::GetFlag(FLAGS_weight_seed);
  options.max_shard_bytes = absl::GetFlag(FLAGS_shard_bytes);
  options.overwrite = absl::GetFlag(FLAGS_overwrite);
  const std::optional<DType> dtype = DTypeFromName(absl::GetFlag(FLAGS_weight_dtype));
  if (!dtype.has_value() || (!IsActivationDType(*dtype) && *dtype != DType::kFloat8E4M3)) {
    return FlagError(absl::StrCat("--weight_dtype is '", absl::GetFlag(FLAGS_weight_dtype),
                                  "'; it takes float32, float16, bfloat16 or float8_e4m3"));
  }
  options.dtype = *dtype;
  const std::string directory = absl::GetFlag(FLAGS_out);
  if (directory.empty()) return FlagError("--out is missing; it takes a folder to write to");

  if (options.num_experts >= 1 && (options.topk < 1 || options.topk > options.num_experts)) {
    return FlagError(absl::StrCat("--experts_per_token is ", options.topk,
                                  "; it takes 1 to --num_experts, which is ", options.num_experts));
  }
  // Of all that can be wrong with a config, these options alone are to blame.
  if (absl::Status status = SyntheticConfigJson(options).status(); !status.ok()) {
    return FlagErrorOf(status);
  }
  if (absl::Status status = CheckDiskSpace(directory, options); !status.ok()) return status;

  const bool terminal = isatty(STDERR_FILENO) != 0;
  const auto summary =
      WriteSyntheticCheckpoint(directory, options, [&](int64_t written, int64_t total) {
        if (terminal && total > 0) {
          fprintf(stderr, "\r  %3lld%% of %.1f MB%s", static_cast<long long>(100 * written / total),
                  static_cast<double>(total) * 1e-6, written == total ? "\n" : "");
        }
      });
  if (absl::IsAlreadyExists(summary.status())) {
    return absl::AlreadyExistsError(
        absl::StrCat(summary.status().message(), " (--overwrite replaces it)"));
  }
  // The options are all that its input is.
  if (absl::IsInvalidArgument(summary.status())) return FlagError(summary.status().message());
  if (!summary.ok()) return summary.status();
  const LayerSpec& layer = summary->model.layers.front();
  printf("%s: %s, %zu layers of %d experts, hidden size %lld, intermediate %lld, top-%d, %s\n",
         directory.c_str(), summary->model.architecture.c_str(), summary->model.layers.size(),
         layer.num_experts, static_cast<long long>(summary->model.hidden_size),
         static_cast<long long>(layer.intermediate_size), layer.topk,
         std::string(DTypeName(options.dtype)).c_str());
  printf("  %lld tensors, %.1f MB in %lld file%s\n", static_cast<long long>(summary->num_tensors),
         static_cast<double>(summary->size_bytes) * 1e-6,
         static_cast<long long>(summary->num_files), summary->num_files == 1 ? "" : "s");
  return absl::OkStatus();
}

}  // namespace

const Command kCheckpointCommand = {
    "checkpoint", "writes a small synthetic checkpoint in Hugging Face format",
    "  --out=DIR\n"
    "  --architecture=NAME --num_layers=N --num_experts=N --experts_per_token=N\n"
    "  --hidden_size=N --intermediate_size=N --weight_dtype=T --weight_seed=N\n"
    "  --weight_dtype takes float32, float16, bfloat16 (the default) or float8_e4m3\n"
    "  --shard_bytes=N   several files and an index\n"
    "  --overwrite       replace what is there\n\n"
    "  expertmesh checkpoint --out=tiny-moe\n",
    "checkpoint_command.cc", Run};

}  // namespace expertmesh
