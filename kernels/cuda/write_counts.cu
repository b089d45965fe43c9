#include <algorithm>

#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/write_counts.h"

namespace expertmesh {
namespace {

constexpr int kThreads = 128;
// Kernel parameters may take 4 KiB.
constexpr int32_t kCountsPerLaunch = 1000;

struct WriteCountsParams {
  int32_t* device_counts = nullptr;
  int32_t num_counts = 0;
  int32_t counts[kCountsPerLaunch];
};
static_assert(sizeof(WriteCountsParams) <= 4096);

__global__ void __launch_bounds__(kThreads)
    WriteCounts(const __grid_constant__ WriteCountsParams params) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < params.num_counts; i += kThreads) {
    params.device_counts[i] = params.counts[i];
  }
}

}  // namespace

cudaError_t LaunchWriteCounts(const int32_t* counts, int32_t num_counts, int32_t* device_counts,
                              cudaStream_t stream) {
  for (int32_t first = 0; first < num_counts; first += kCountsPerLaunch) {
    WriteCountsParams write;
    write.device_counts = device_counts + first;
    write.num_counts = std::min(kCountsPerLaunch, num_counts - first);
    std::copy_n(counts + first, write.num_counts, write.counts);
    const cudaError_t error = LaunchKernel(WriteCounts, 1, kThreads, stream, write);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace expertmesh
