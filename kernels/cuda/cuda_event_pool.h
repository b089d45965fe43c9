#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_EVENT_POOL_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_EVENT_POOL_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "kernels/base/handle_pool.h"

namespace expertmesh {

using CudaEventPool = HandlePool<cudaEvent_t>;

// Of events of one device, without timing. It must be current on the thread that calls Take.
std::shared_ptr<CudaEventPool> NewCudaEventPool(int32_t device_index);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_EVENT_POOL_H_
