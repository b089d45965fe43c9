#ifndef EXPERTMESH_TESTS_KERNELS_CUDA_DEVICE_BYTES_H_
#define EXPERTMESH_TESTS_KERNELS_CUDA_DEVICE_BYTES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/base/dtype.h"

namespace expertmesh {

// Memory of the test device, exactly as large as it says, `misalignment` bytes behind a 64-byte
// boundary, filled with a pattern that is NaN in every float type and no sensible integer. What
// stands beside it may be neither read (AddressSanitizer tells) nor written. Memory that a kernel
// touches is always one of these.
class DeviceBytes {
 public:
  explicit DeviceBytes(int64_t size_bytes, int64_t misalignment = 0);
  DeviceBytes(const std::vector<std::byte>& bytes, int64_t misalignment);

  std::byte* data() const { return data_; }
  template <class T>
  T* As() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t size_bytes() const { return size_bytes_; }
  std::vector<std::byte> bytes() const { return {data_, data_ + size_bytes_}; }
  bool IsPoison(int64_t offset, int64_t count) const;
  // Fails the test when something was written beside [data, data + size_bytes).
  void ExpectGuardsIntact() const;

 private:
  struct FreeMemory {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, FreeMemory> memory_;
  std::byte* data_;
  int64_t size_bytes_;
};

// Runs `launch` kTestDeviceRuns times, each into a fresh output, and waits for it. Fails the test
// when a launch fails, when something beside the output was written, or when the bytes are not the
// same each time. Returns the output of the first run.
DeviceBytes RunRepeatedly(int64_t output_bytes, int64_t misalignment,
                          const std::function<cudaError_t(std::byte* output)>& launch);

template <class T>
DeviceBytes DeviceCopy(const std::vector<T>& values) {
  const std::byte* first = reinterpret_cast<const std::byte*>(values.data());
  return DeviceBytes(std::vector<std::byte>(first, first + values.size() * sizeof(T)), 0);
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_CUDA_DEVICE_BYTES_H_
