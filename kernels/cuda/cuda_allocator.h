#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_ALLOCATOR_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_ALLOCATOR_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/base/buffer.h"

namespace expertmesh {

enum class CudaMemory : uint8_t {
  kDevice,      // device() is the GPU
  kPinnedHost,  // device() is the host; kernels and copies of every GPU reach it at the same
                // address
};

struct CudaMemoryUsage {
  int64_t allocated_bytes = 0;  // in buffers that are out
  int64_t cached_bytes = 0;     // kept for reuse
};

// Memory of one GPU, or host memory that it reaches, in size classes. Freed buffers are kept and
// reused, because allocating stops the device; they go back when memory runs out, or with the
// allocator. A freed buffer may be somebody else's at once, on any stream: whoever frees it has
// waited for the streams that use it (or lets an Event do so: OnDone). Buffers are aligned to 256
// bytes.
class CudaAllocator : public Allocator {
 public:
  CudaAllocator(CudaMemory memory, int32_t device_index);
  ~CudaAllocator() override;

  Device device() const override;
  absl::StatusOr<Buffer> Allocate(int64_t size_bytes) override;
  CudaMemoryUsage usage() const;
  // What a buffer of this size takes of the memory.
  static int64_t TakenBytes(int64_t size_bytes);
  // Whether `data` stands in a buffer that is out, or could be.
  bool Owns(const void* data) const;

 protected:
  void Free(std::byte* data, int64_t size_bytes) override;

 private:
  struct State;
  void ReleaseCached();

  const CudaMemory memory_;
  const int32_t device_index_;
  const std::unique_ptr<State> state_;
};

// The memory of one GPU's rank. Shared, because what a stream has not passed yet keeps it.
struct CudaAllocators {
  std::shared_ptr<CudaAllocator> device;
  std::shared_ptr<CudaAllocator> pinned;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_ALLOCATOR_H_
