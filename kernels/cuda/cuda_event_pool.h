#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_EVENT_POOL_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_EVENT_POOL_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"

namespace expertmesh {

// Events of one device, without timing, used again and again. Thread safe; events may outlive it.
class CudaEventPool : public std::enable_shared_from_this<CudaEventPool> {
 public:
  // Goes back to the pool with its last reference.
  using SharedEvent = std::shared_ptr<std::remove_pointer_t<cudaEvent_t>>;

  explicit CudaEventPool(int32_t device_index) : device_index_(device_index) {}
  ~CudaEventPool();
  CudaEventPool(const CudaEventPool&) = delete;
  CudaEventPool& operator=(const CudaEventPool&) = delete;

  // The device is current on the calling thread.
  absl::StatusOr<SharedEvent> Take();

 private:
  const int32_t device_index_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> idle_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_EVENT_POOL_H_
