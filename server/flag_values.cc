#include "server/flag_values.h"

#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace expertmesh {

absl::StatusOr<std::string> ReadFlagFile(const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read ", path));
  return text.str();
}

absl::StatusOr<std::optional<CpuIsa>> ParseIsaFlag(const std::string& name) {
  if (name == "auto") return std::nullopt;
  std::string known = "auto";
  for (const CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512Bf16}) {
    if (name == CpuIsaName(isa)) return isa;
    absl::StrAppend(&known, ", ", CpuIsaName(isa));
  }
  return absl::InvalidArgumentError(absl::StrCat("--isa is '", name, "'; known: ", known));
}

absl::Status CheckPositive(const char* flag, int64_t value) {
  if (value > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", value, "; at least 1"));
}

absl::Status CheckPositive(const char* flag, absl::Duration value) {
  if (value > absl::ZeroDuration()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " is ", absl::FormatDuration(value), "; above 0"));
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ParseModelFlags(
    const std::string& checkpoint, const std::string& model_name,
    const std::vector<std::string>& models) {
  std::vector<std::pair<std::string, std::string>> folders;
  if (!checkpoint.empty()) folders.emplace_back(model_name, checkpoint);
  for (const std::string& text : models) {
    const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
    if (parts.size() != 2 || parts[0].empty() || parts[1].empty()) {
      return absl::InvalidArgumentError(absl::StrCat("--model has '", text, "'; NAME=DIR"));
    }
    folders.emplace_back(parts[0], parts[1]);
  }
  if (folders.empty()) return absl::InvalidArgumentError("--checkpoint is missing");
  return folders;
}

}  // namespace expertmesh
