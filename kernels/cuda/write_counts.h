#ifndef EXPERTMESH_KERNELS_CUDA_WRITE_COUNTS_H_
#define EXPERTMESH_KERNELS_CUDA_WRITE_COUNTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace expertmesh {

// Enqueues device_counts[i] = counts[i] for i in [0, num_counts); not blocking. Local. Thread safe.
// The host's counts are read before the call returns: they travel as kernel parameters, so that no
// pinned memory has to live until the stream has passed, as a copy's would. A launch for each 1,000
// of them. Errors are the launch's.
[[nodiscard]] cudaError_t LaunchWriteCounts(const int32_t* counts, int32_t num_counts,
                                            int32_t* device_counts, cudaStream_t stream);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_WRITE_COUNTS_H_
