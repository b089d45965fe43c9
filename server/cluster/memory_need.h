#ifndef EXPERTMESH_SERVER_CLUSTER_MEMORY_NEED_H_
#define EXPERTMESH_SERVER_CLUSTER_MEMORY_NEED_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/model_spec.h"
#include "server/model/placement.h"

namespace expertmesh {

// Bytes of one rank's experts of one layer in the model's dtype, shared ones and float8's scales
// included; packing adds less than a panel of 32 columns per matrix. The spec must be valid.
// OUT_OF_RANGE when they do not fit an int64.
absl::StatusOr<int64_t> PackedLayerBytes(const ModelSpec& model, const LayerSpec& layer,
                                         const Placement& placement, int32_t ep_rank);

// What these weights take of a device's memory, which gives no buffer less than
// `taken_bytes(size_bytes)`: buffers as CudaExpertWeights and SharedExperts allocate them.
// OUT_OF_RANGE as above.
absl::StatusOr<int64_t> TakenLayerBytes(const ModelSpec& model, const LayerSpec& layer,
                                        const Placement& placement, int32_t ep_rank,
                                        absl::FunctionRef<int64_t(int64_t size_bytes)> taken_bytes);

// What weights must leave of a device's free memory, for what comes after them: the rows of steps,
// NCCL's own buffers, the driver's. A sixteenth, 2 GiB at most.
int64_t DeviceReserveBytes(int64_t free_bytes);

// What this process may still take: MemAvailable of /proc/meminfo, and what the limits of its
// control groups (v1 or v2, all ancestors) leave, page cache that can be dropped counted as free;
// the smallest. `root` stands before /proc and /sys, for tests. NOT_FOUND when /proc/meminfo cannot
// be read.
absl::StatusOr<int64_t> AvailableMemoryBytes(const std::string& root = "");

// Resident bytes of this process; 0 when /proc does not say.
int64_t ResidentMemoryBytes();

// RESOURCE_EXHAUSTED naming the numbers when need exceeds what is available beside `reserve_bytes`.
absl::Status CheckMemoryNeed(int64_t need_bytes, int64_t available_bytes,
                             int64_t reserve_bytes = 0);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_MEMORY_NEED_H_
