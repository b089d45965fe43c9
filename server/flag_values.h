#ifndef EXPERTMESH_SERVER_FLAG_VALUES_H_
#define EXPERTMESH_SERVER_FLAG_VALUES_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cuda/cuda_device.h"
#include "server/model/checkpoint_weight_source.h"
#include "server/ops/command_line.h"

// What the values of flags that several programs have mean. Errors are INVALID_ARGUMENT (NOT_FOUND
// for a file) and name the flag.

namespace expertmesh {

// nullopt for "auto".
absl::StatusOr<std::optional<CpuIsa>> ParseIsaFlag(const std::string& name);
// The GPU of "cuda:N", open: FAILED_PRECONDITION "--device=cuda:0: <why>" when it is not to be had.
// Null for "cpu". Sets CUDA_MODULE_LOADING in the environment: call it before there are threads,
// which might be reading that.
absl::StatusOr<std::shared_ptr<CudaDevice>> OpenDeviceFlag(const std::string& value,
                                                           const CudaDeviceOptions& options = {});
// Logs a warning when the device is one on which this build is slow. Null is fine.
void WarnOfSlowDevice(const CudaDevice* device);
// Of --fp8_weights: auto is native on a GPU. `on_gpu`: what --device says.
absl::StatusOr<Fp8Weights> ParseFp8WeightsFlag(const std::string& value, bool on_gpu);
absl::Status CheckPositive(const char* flag, int64_t value);
absl::Status CheckPositive(const char* flag, absl::Duration value);
absl::Status CheckNotNegative(const char* flag, absl::Duration value);
absl::Status CheckNotNegative(const char* flag, int64_t value);
absl::Status CheckAtLeast(const char* flag, absl::Duration value, absl::Duration limit);
absl::Status CheckAtMost(const char* flag, int64_t value, int64_t limit);
absl::Status CheckBetween(const char* flag, ByteSize value, ByteSize least, ByteSize most);
// 0 (one for each core) to some thousands.
absl::Status CheckThreads(int value);

// An address to listen on, or "unix:path", which gRPC takes as well.
absl::Status CheckGrpcListenFlag(const char* flag, const std::string& value);
// Pairs of name and folder, of --checkpoint and --model_name, and of --model's NAME=DIR.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ParseModelFlags(
    const std::string& checkpoint, const std::string& model_name,
    const std::vector<std::string>& models);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_FLAG_VALUES_H_
