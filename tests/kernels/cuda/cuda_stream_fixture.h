#ifndef EXPERTMESH_TESTS_KERNELS_CUDA_CUDA_STREAM_FIXTURE_H_
#define EXPERTMESH_TESTS_KERNELS_CUDA_CUDA_STREAM_FIXTURE_H_

#include <cstdint>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/cuda/cuda_allocator.h"
#include "kernels/cuda/cuda_stream.h"
#include "tests/kernels/cuda/emulated_cuda_test.h"

namespace expertmesh {

// Streams and memory of a device that is not there.
class CudaStreamFixture : public EmulatedCudaTest {
 protected:
  static absl::Time Soon() { return absl::Now() + absl::Seconds(30); }
  static absl::Status Copy(Stream& stream, const Buffer& buffer, const std::vector<char>& bytes) {
    return stream.Copy(buffer.data(), bytes.data(), static_cast<int64_t>(bytes.size()));
  }
  // Device work that only tells that its turn has come; `launched` must outlive it.
  static absl::Status LaunchMark(CudaStream& stream, bool* launched) {
    return stream.Launch([launched](cudaStream_t) {
      *launched = true;
      return absl::OkStatus();
    });
  }

  CudaAllocator allocator_{CudaMemory::kDevice, 0};
  CudaAllocator pinned_{CudaMemory::kPinnedHost, 0};
  CudaStreamPool pool_{0};
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_CUDA_CUDA_STREAM_FIXTURE_H_
