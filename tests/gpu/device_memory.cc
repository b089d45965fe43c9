#include "tests/gpu/device_memory.h"

#include <cstdio>
#include <cstdlib>

namespace expertmesh {

void CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "gpu_bench: %s: %s (%s)\n", what, cudaGetErrorName(error),
               cudaGetErrorString(error));
  std::exit(1);
}

DeviceMemory::DeviceMemory(int64_t size_bytes) : size_bytes_(size_bytes) {
  void* memory = nullptr;
  CheckCuda(cudaMalloc(&memory, static_cast<size_t>(size_bytes)), "cudaMalloc");
  data_ = static_cast<std::byte*>(memory);
}

DeviceMemory::~DeviceMemory() {
  // What ran before was waited for and its errors reported.
  static_cast<void>(cudaFree(data_));
}

void CopyToDevice(void* device, const void* host, int64_t size_bytes) {
  CheckCuda(cudaMemcpy(device, host, static_cast<size_t>(size_bytes), cudaMemcpyHostToDevice),
            "copy to the device");
}

void CopyToHost(void* host, const void* device, int64_t size_bytes) {
  CheckCuda(cudaMemcpy(host, device, static_cast<size_t>(size_bytes), cudaMemcpyDeviceToHost),
            "copy from the device");
}

}  // namespace expertmesh
