#include <cstdio>
#include <cstdlib>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {
namespace {

// Without a GPU every test of the binary is skipped, and says so.
class GpuEnvironment : public testing::Environment {
 public:
  void SetUp() override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      GTEST_SKIP() << "no GPU: " << cudaGetErrorString(error);
    }
  }
};

[[maybe_unused]] testing::Environment* const kEnvironment =
    testing::AddGlobalTestEnvironment(new GpuEnvironment);

}  // namespace

std::byte* AllocateOnTestDevice(int64_t size_bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMallocManaged(&memory, static_cast<size_t>(size_bytes));
  if (error != cudaSuccess) {
    std::fprintf(stderr, "cudaMallocManaged: %s\n", cudaGetErrorString(error));
    std::abort();
  }
  return static_cast<std::byte*>(memory);
}

void FreeOnTestDevice(std::byte* memory) {
  // Launches that nobody waited for are done before; an error was reported where it arose.
  static_cast<void>(cudaFree(memory));
}

void BeginRun(int) {}
cudaError_t EndRun() { return cudaDeviceSynchronize(); }
int64_t NumLaunches() { return 0; }

}  // namespace expertmesh
