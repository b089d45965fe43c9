#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_UPLOAD_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_UPLOAD_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/base/buffer.h"
#include "kernels/base/stream.h"
#include "kernels/cuda/cuda_allocator.h"

namespace expertmesh {

// The memory of one GPU's rank. Shared, because what a stream has not passed yet keeps it.
struct CudaAllocators {
  std::shared_ptr<CudaAllocator> device;
  std::shared_ptr<CudaAllocator> pinned;
};

// What a launch needs on the device (lists of indices, rows of the host), gathered in pinned memory
// and copied there as one blob. Reserve all parts, allocate, fill, then copy within the launch. Not
// thread safe.
class CudaUpload {
 public:
  explicit CudaUpload(const CudaAllocators& allocators) : allocators_(allocators) {}

  // Where a part of that many bytes will stand; 256-byte aligned.
  int64_t Reserve(int64_t size_bytes);
  // Of memory on the device alone, behind all others.
  int64_t ReserveOnDevice(int64_t size_bytes);
  absl::Status Allocate();

  template <class T>
  T* host(int64_t offset) const {
    return reinterpret_cast<T*>(host_.data() + offset);
  }
  template <class T>
  T* device(int64_t offset) const {
    return reinterpret_cast<T*>(device_.data() + offset);
  }
  // device() of what ReserveOnDevice returned.
  std::byte* device_only(int64_t offset) const { return device_.data() + upload_bytes_ + offset; }

  // The number of elements must be what was reserved, at least.
  template <class T>
  void Fill(int64_t offset, absl::Span<const T> values) {
    std::copy(values.begin(), values.end(), host<T>(offset));
  }

  // Enqueues the copy.
  absl::Status Copy(cudaStream_t stream) const;

  // Frees the memory once `stream` has passed everything that is enqueued on it now.
  static absl::Status FreeAfter(Stream& stream, std::shared_ptr<CudaUpload> upload);

 private:
  const CudaAllocators allocators_;
  int64_t upload_bytes_ = 0;
  int64_t device_only_bytes_ = 0;
  Buffer host_;
  Buffer device_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_UPLOAD_H_
