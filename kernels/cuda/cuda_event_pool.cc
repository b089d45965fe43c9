#include "kernels/cuda/cuda_event_pool.h"

#include "kernels/cuda/cuda_status.h"

namespace expertmesh {

CudaEventPool::~CudaEventPool() {
  // Nobody is left to tell of an error; a lost context has freed everything anyway.
  for (cudaEvent_t event : idle_) static_cast<void>(cudaEventDestroy(event));
}

absl::StatusOr<CudaEventPool::SharedEvent> CudaEventPool::Take() {
  cudaEvent_t event = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      event = idle_.back();
      idle_.pop_back();
    }
  }
  if (event == nullptr) {
    const absl::Status status = CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                                           "cudaEventCreateWithFlags", device_index_);
    if (!status.ok()) return status;
  }
  return SharedEvent(event, [pool = shared_from_this()](cudaEvent_t returned) {
    const std::lock_guard<std::mutex> lock(pool->mutex_);
    pool->idle_.push_back(returned);
  });
}

}  // namespace expertmesh
