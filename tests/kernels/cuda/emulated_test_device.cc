#include <cstdlib>

#include "tests/kernels/cuda/emulated_cuda_runtime.h"
#include "tests/kernels/cuda/grid_emulation.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {

std::byte* AllocateOnTestDevice(int64_t size_bytes) {
  const size_t rounded = (static_cast<size_t>(size_bytes) + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, rounded);
  if (memory == nullptr) std::abort();
  return static_cast<std::byte*>(memory);
}

void FreeOnTestDevice(std::byte* memory) { std::free(memory); }

void BeginRun(int run) {
  constexpr uint64_t kOrders[kTestDeviceRuns] = {0, 1, 4711};
  constexpr unsigned kGridLimits[kTestDeviceRuns] = {0, 1, 2};
  SetEmulatedOrder(kOrders[run]);
  SetEmulatedGridLimit(kGridLimits[run]);
}

cudaError_t EndRun() {
  SetEmulatedOrder(0);
  SetEmulatedGridLimit(0);
  return cudaSuccess;
}

void ResetTestDevice(uint64_t seed) { ResetEmulatedCuda({.seed = seed}); }

int64_t NumLaunches() { return EmulatedCounts().launches; }

}  // namespace expertmesh
