#ifndef EXPERTMESH_SERVER_CLUSTER_MEMORY_NEED_H_
#define EXPERTMESH_SERVER_CLUSTER_MEMORY_NEED_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/model_spec.h"
#include "server/model/placement.h"

namespace expertmesh {

// Bytes of one rank's experts of one layer in the model's dtype, shared ones included; packing adds
// less than a panel of 32 columns per matrix. The spec must be valid. OUT_OF_RANGE when they do not
// fit an int64.
absl::StatusOr<int64_t> PackedLayerBytes(const ModelSpec& model, const LayerSpec& layer,
                                         const Placement& placement, int32_t ep_rank);

// What this process may still take: MemAvailable of /proc/meminfo, and what the limits of its
// control groups (v1 or v2, all ancestors) leave, page cache that can be dropped counted as free;
// the smallest. `root` stands before /proc and /sys, for tests. NOT_FOUND when /proc/meminfo cannot
// be read.
absl::StatusOr<int64_t> AvailableMemoryBytes(const std::string& root = "");

// Resident bytes of this process; 0 when /proc does not say.
int64_t ResidentMemoryBytes();

// RESOURCE_EXHAUSTED naming both numbers when need exceeds available.
absl::Status CheckMemoryNeed(int64_t need_bytes, int64_t available_bytes);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_MEMORY_NEED_H_
