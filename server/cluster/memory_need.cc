#include "server/cluster/memory_need.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/checked_math.h"

namespace expertmesh {
namespace {

// The value behind `key` in lines of "key value ...".
std::optional<int64_t> ReadKey(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    int64_t value;
    if (words >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

// A file with one number; nullopt also for "max".
std::optional<int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  int64_t value;
  if (!(file >> word) || !absl::SimpleAtoi(word, &value)) return std::nullopt;
  return value;
}

// What the limit of one control group leaves.
std::optional<int64_t> CgroupFreeBytes(const std::string& directory, const char* limit_file,
                                       const char* usage_file, const char* cache_key) {
  const std::optional<int64_t> limit = ReadNumber(directory + "/" + limit_file);
  const std::optional<int64_t> usage = ReadNumber(directory + "/" + usage_file);
  if (!limit || !usage) return std::nullopt;
  const int64_t droppable = ReadKey(directory + "/memory.stat", cache_key).value_or(0);
  return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *usage - droppable));
}

}  // namespace

absl::StatusOr<int64_t> PackedLayerBytes(const ModelSpec& model, const LayerSpec& layer,
                                         const Placement& placement, int32_t ep_rank) {
  const int64_t num_local_experts = static_cast<int64_t>(placement.local_experts(ep_rank).size());
  std::optional<int64_t> bytes =
      CheckedSizeProduct({num_local_experts, ExpertWeightBytes(model, layer)});
  if (bytes) bytes = CheckedAdd(*bytes, SharedExpertWeightBytes(model, layer));
  if (!bytes) {
    return absl::OutOfRangeError(absl::StrCat("layer ", layer.index, ": ", num_local_experts,
                                              " experts of ", model.hidden_size, " x ",
                                              layer.intermediate_size, " fit no memory"));
  }
  return *bytes;
}

absl::StatusOr<int64_t> TakenLayerBytes(
    const ModelSpec& model, const LayerSpec& layer, const Placement& placement, int32_t ep_rank,
    absl::FunctionRef<int64_t(int64_t size_bytes)> taken_bytes) {
  // Whose parts then fit, too.
  const absl::StatusOr<int64_t> packed = PackedLayerBytes(model, layer, placement, ep_rank);
  if (!packed.ok()) return packed.status();
  std::optional<int64_t> sum = 0;
  const auto take = [&sum, taken_bytes](int64_t size_bytes) {
    if (sum) sum = CheckedAdd(*sum, taken_bytes(size_bytes));
  };
  const auto take_experts = [&](int32_t num_experts, int64_t intermediate_size) {
    const ExpertLayerShape shape = MakeExpertLayerShape(model, num_experts, intermediate_size);
    const int64_t matrix_bytes =
        num_experts * model.hidden_size * intermediate_size * DTypeBytes(model.weight_dtype);
    const int64_t scale_bytes = num_experts * Float8ScalesPerMatrix(shape) * int64_t{sizeof(float)};
    take(2 * matrix_bytes);
    take(matrix_bytes);
    if (scale_bytes == 0) return;
    take(2 * scale_bytes);
    take(scale_bytes);
  };
  take_experts(static_cast<int32_t>(placement.local_experts(ep_rank).size()),
               layer.intermediate_size);
  take_experts(1, layer.shared_intermediate_size);
  take(layer.shared_gated ? model.hidden_size * int64_t{sizeof(float)} : 0);
  if (!sum) return absl::OutOfRangeError("the experts fit no memory");
  return *sum;
}

int64_t DeviceReserveBytes(int64_t free_bytes) {
  return std::min(free_bytes / 16, int64_t{2} << 30);
}

absl::StatusOr<int64_t> AvailableMemoryBytes(const std::string& root) {
  const std::optional<int64_t> available_kib = ReadKey(root + "/proc/meminfo", "MemAvailable:");
  if (!available_kib) {
    return absl::NotFoundError(absl::StrCat(root, "/proc/meminfo: no MemAvailable"));
  }
  int64_t available = *available_kib * 1024;

  const auto limit_to = [&](const std::optional<int64_t>& bytes) {
    if (bytes) available = std::min(available, *bytes);
  };
  std::ifstream cgroups(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(cgroups, line)) {
    // hierarchy:controllers:path; v2 is "0::path". Inside a container the path may be the host's
    // and not exist here: then the mount's own files are what counts, and they are read anyway.
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    std::string path = line.substr(second + 1);
    while (true) {
      limit_to(v2 ? CgroupFreeBytes(root + "/sys/fs/cgroup" + path, "memory.max", "memory.current",
                                    "inactive_file")
                  : CgroupFreeBytes(root + "/sys/fs/cgroup/memory" + path, "memory.limit_in_bytes",
                                    "memory.usage_in_bytes", "total_inactive_file"));
      const size_t slash = path.rfind('/');
      if (slash == std::string::npos || path.empty()) break;
      path.resize(slash);
    }
  }
  return available;
}

int64_t ResidentMemoryBytes() { return ReadKey("/proc/self/status", "VmRSS:").value_or(0) * 1024; }

absl::Status CheckMemoryNeed(int64_t need_bytes, int64_t available_bytes, int64_t reserve_bytes) {
  if (need_bytes <= available_bytes - reserve_bytes) return absl::OkStatus();
  constexpr double kGib = 1 << 30;
  std::string error = absl::StrFormat(
      "the experts need %d bytes (%.2f GiB) of memory, %d bytes (%.2f GiB) are available",
      need_bytes, static_cast<double>(need_bytes) / kGib, available_bytes,
      static_cast<double>(available_bytes) / kGib);
  if (reserve_bytes > 0) {
    absl::StrAppendFormat(&error, ", of which %d bytes (%.2f GiB) are kept for steps",
                          reserve_bytes, static_cast<double>(reserve_bytes) / kGib);
  }
  return absl::ResourceExhaustedError(error);
}

}  // namespace expertmesh
