#ifndef EXPERTMESH_KERNELS_CUDA_VERIFIED_UPLOAD_H_
#define EXPERTMESH_KERNELS_CUDA_VERIFIED_UPLOAD_H_

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/cuda/cuda_allocator.h"
#include "kernels/cuda/cuda_stream.h"

namespace expertmesh {

struct VerifiedUploadParams {
  CudaAllocators allocators;
  CudaStreamPool* streams = nullptr;
  std::byte* to = nullptr;  // device
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  // At least one row is moved at a time.
  int64_t chunk_bytes = 4 << 20;
};

// Writes rows to the device and reads them back: DATA_LOSS with the place of the first byte that
// differs. `pack(first_row, num_rows, memory)` makes rows in pinned memory, in ascending order, on
// the calling thread; while it does, the rows before are on their way. Blocking. RESOURCE_EXHAUSTED
// for memory; errors of the device.
absl::Status UploadVerified(
    const VerifiedUploadParams& params,
    absl::FunctionRef<void(int64_t first_row, int64_t num_rows, std::byte* memory)> pack);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_VERIFIED_UPLOAD_H_
