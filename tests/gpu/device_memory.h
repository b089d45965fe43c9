#ifndef EXPERTMESH_TESTS_GPU_DEVICE_MEMORY_H_
#define EXPERTMESH_TESTS_GPU_DEVICE_MEMORY_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace expertmesh {

// Ends the program with what failed: a figure taken after an error would be worth nothing.
void CheckCuda(cudaError_t error, const char* what);

// Memory of the current device.
class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t size_bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }
  template <class T>
  T* As() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_bytes_;
};

void CopyBlocking(void* to, const void* from, int64_t size_bytes, cudaMemcpyKind kind);

template <class T>
void CopyToDevice(const DeviceMemory& device, const std::vector<T>& host) {
  CopyBlocking(device.data(), host.data(), static_cast<int64_t>(host.size() * sizeof(T)),
               cudaMemcpyHostToDevice);
}

// `count` elements from element `first` on.
template <class T>
std::vector<T> ReadDevice(const void* device, int64_t first, int64_t count) {
  std::vector<T> host(static_cast<size_t>(count));
  CopyBlocking(host.data(), static_cast<const T*>(device) + first,
               count * static_cast<int64_t>(sizeof(T)), cudaMemcpyDeviceToHost);
  return host;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_GPU_DEVICE_MEMORY_H_
