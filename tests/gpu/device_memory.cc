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

void CopyBlocking(void* to, const void* from, int64_t size_bytes, cudaMemcpyKind kind) {
  cudaStream_t stream = nullptr;
  CheckCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream for a copy");
  CheckCuda(cudaMemcpyAsync(to, from, static_cast<size_t>(size_bytes), kind, stream), "a copy");
  CheckCuda(cudaStreamSynchronize(stream), "a copy");
  CheckCuda(cudaStreamDestroy(stream), "a copy's end");
}

}  // namespace expertmesh
