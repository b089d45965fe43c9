#ifndef EXPERTMESH_TESTS_GPU_DEVICE_TIMER_H_
#define EXPERTMESH_TESTS_GPU_DEVICE_TIMER_H_

#include <cuda_runtime_api.h>

#include <functional>

namespace expertmesh {

// Seconds that one `launch` takes on `stream`: warmed up, then the median of several rounds of many
// launches between two events. `launch` enqueues and returns its error.
double SecondsPerLaunch(cudaStream_t stream, const std::function<cudaError_t()>& launch);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_DEVICE_TIMER_H_
