#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_DEVICE_POINT_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_DEVICE_POINT_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/base/stream.h"

namespace expertmesh {

// An event of CUDA that is recorded already: every DevicePoint of a CUDA device is one. `owner`
// sees to it that nobody records or destroys the event meanwhile.
class CudaDevicePoint : public DevicePoint {
 public:
  CudaDevicePoint(int32_t device_index, cudaEvent_t event, std::shared_ptr<const void> owner)
      : DevicePoint(Device{DeviceType::kCuda, device_index}),
        event_(event),
        owner_(std::move(owner)) {}
  cudaEvent_t event() const { return event_; }

 private:
  const cudaEvent_t event_;
  const std::shared_ptr<const void> owner_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_DEVICE_POINT_H_
