#include <cstdio>
#include <cstdlib>
#include <map>

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

// What is allocated, and its size.
std::map<std::byte*, size_t>& Allocations() {
  static auto* const allocations = new std::map<std::byte*, size_t>;
  return *allocations;
}

}  // namespace

std::byte* AllocateOnTestDevice(int64_t size_bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMallocManaged(&memory, static_cast<size_t>(size_bytes));
  if (error != cudaSuccess) {
    std::fprintf(stderr, "cudaMallocManaged: %s\n", cudaGetErrorString(error));
    std::abort();
  }
  Allocations()[static_cast<std::byte*>(memory)] = static_cast<size_t>(size_bytes);
  return static_cast<std::byte*>(memory);
}

void FreeOnTestDevice(std::byte* memory) {
  Allocations().erase(memory);
  // Launches that nobody waited for are done before; an error was reported where it arose.
  static_cast<void>(cudaFree(memory));
}

// Everything is on the GPU before kernels run, so that no TMA copy of theirs meets a page that is
// not.
void BeginRun(int) {
  cudaMemLocation location = {};
  location.type = cudaMemLocationTypeDevice;
  for (const auto& [memory, size_bytes] : Allocations()) {
    if (size_bytes == 0) continue;
    const cudaError_t error = cudaMemPrefetchAsync(memory, size_bytes, location, 0, nullptr);
    if (error != cudaSuccess) {
      std::fprintf(stderr, "cudaMemPrefetchAsync: %s\n", cudaGetErrorString(error));
      std::abort();
    }
  }
}
cudaError_t EndRun() { return cudaDeviceSynchronize(); }
void ResetTestDevice(uint64_t /*seed*/) {}
int64_t NumLaunches() { return 0; }

}  // namespace expertmesh
