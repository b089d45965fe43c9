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

// Memory whose pages move between host and GPU; where a GPU has none of that kind (virtual ones,
// and machines whose kernel lacks what it takes), pinned memory, which kernels reach over the bus.
bool HasManagedMemory() {
  static const bool has = [] {
    int device = 0;
    int is_concurrent = 0;
    void* memory = nullptr;
    cudaMemLocation location = {};
    location.type = cudaMemLocationTypeDevice;
    const bool works = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&is_concurrent, cudaDevAttrConcurrentManagedAccess,
                                              device) == cudaSuccess &&
                       is_concurrent != 0 && cudaMallocManaged(&memory, 1) == cudaSuccess &&
                       cudaMemPrefetchAsync(memory, 1, location, 0, nullptr) == cudaSuccess &&
                       cudaDeviceSynchronize() == cudaSuccess;
    if (memory != nullptr) static_cast<void>(cudaFree(memory));
    static_cast<void>(cudaGetLastError());
    if (!works) std::printf("managed memory does not work here: tests use pinned memory\n");
    return works;
  }();
  return has;
}

}  // namespace

std::byte* AllocateOnTestDevice(int64_t size_bytes) {
  void* memory = nullptr;
  const size_t size = static_cast<size_t>(size_bytes);
  const cudaError_t error = HasManagedMemory() ? cudaMallocManaged(&memory, size)
                                               : cudaHostAlloc(&memory, size, cudaHostAllocMapped);
  if (error != cudaSuccess) {
    std::fprintf(stderr, "memory of %lld bytes: %s\n", static_cast<long long>(size_bytes),
                 cudaGetErrorString(error));
    std::abort();
  }
  Allocations()[static_cast<std::byte*>(memory)] = size;
  return static_cast<std::byte*>(memory);
}

void FreeOnTestDevice(std::byte* memory) {
  Allocations().erase(memory);
  // Launches that nobody waited for are done before; an error was reported where it arose.
  static_cast<void>(HasManagedMemory() ? cudaFree(memory) : cudaFreeHost(memory));
}

// Everything is on the GPU before kernels run, so that no TMA copy of theirs meets a page that is
// not.
void BeginRun(int) {
  if (!HasManagedMemory()) return;
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
