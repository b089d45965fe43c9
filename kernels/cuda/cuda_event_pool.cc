#include "kernels/cuda/cuda_event_pool.h"

#include "kernels/cuda/cuda_status.h"

namespace expertmesh {

std::shared_ptr<CudaEventPool> NewCudaEventPool(int32_t device_index) {
  return std::make_shared<CudaEventPool>(
      [device_index]() -> absl::StatusOr<cudaEvent_t> {
        cudaEvent_t event = nullptr;
        const absl::Status status =
            CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                       "cudaEventCreateWithFlags", device_index);
        if (!status.ok()) return status;
        return event;
      },
      // Nobody is left to tell of an error; a lost context has freed everything anyway.
      [](cudaEvent_t event) { static_cast<void>(cudaEventDestroy(event)); });
}

}  // namespace expertmesh
