#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_DEVICE_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/buffer.h"
#include "kernels/base/stream.h"
#include "kernels/expert_kernels.h"
#include "kernels/row_ops.h"

namespace expertmesh {

struct CudaDeviceOptions {
  // Of the GPU's multiprocessors, what the products of experts leave to others. Tensor core kernels
  // hold each of theirs until a product is done, so with none left NCCL's kernels, which bring
  // another lane's rows meanwhile, would wait for the end of it: a higher priority only decides who
  // is next on a multiprocessor that is free. Where no other kernel runs beside them a reservation
  // is computing power lost.
  int32_t reserved_multiprocessors = 0;
};

// One GPU, for code that sees no header of CUDA. Thread safe. Streams and kernels may outlive it.
class CudaDevice {
 public:
  virtual ~CudaDevice() = default;
  virtual int32_t index() const = 0;
  virtual const std::string& instruction_set() const = 0;  // "sm_90"
  // Whether this build has tensor core kernels for it; else products run on its other cores, at a
  // small part of the speed.
  virtual bool has_tensor_core_kernels() const = 0;
  // The GPU's memory, and host memory that it reaches.
  virtual const std::shared_ptr<Allocator>& allocator() const = 0;
  virtual const std::shared_ptr<Allocator>& pinned_allocator() const = 0;
  // Free for allocator(), what that keeps for reuse included. 0 when the device does not say.
  virtual int64_t free_bytes() const = 0;
  // Of that, for one buffer of this size.
  virtual int64_t TakenBytes(int64_t size_bytes) const = 0;
  // Not OK when the device, or this process's context on it, is lost, which lasts: every later call
  // fails, and only another process may have the device again. Asks the driver and not the work in
  // progress; for after something has failed.
  virtual absl::Status status() const = 0;

  virtual std::unique_ptr<Stream> NewStream() = 0;
  virtual RowOps& row_ops() = 0;
  virtual absl::StatusOr<std::unique_ptr<ExpertKernels>> NewExpertKernels(
      const ExpertLayerShape& shape) = 0;
  // Hears once when kernels can have no CUDA graphs, and why: launches then take longer, and
  // nothing else changes. Called on any thread; must not block for long.
  virtual void SetGraphErrorListener(std::function<void(const absl::Status&)> listener) = 0;
  // Blocks until the copy is done.
  virtual absl::Status CopyNow(std::byte* to, const std::byte* from, int64_t size_bytes) = 0;
};

// FAILED_PRECONDITION "no GPU: ..." when there is none, or not so many; and when this build has no
// code for its compute capability.
absl::StatusOr<std::shared_ptr<CudaDevice>> OpenCudaDevice(int32_t index,
                                                           const CudaDeviceOptions& options = {});

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_DEVICE_H_
