#ifndef EXPERTMESH_TESTS_KERNELS_CUDA_TEST_DEVICE_H_
#define EXPERTMESH_TESTS_KERNELS_CUDA_TEST_DEVICE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace expertmesh {

// What the kernels under test run on: emulated_test_device.cc is the CPU, gpu_test_device.cc a GPU.
// One of them is linked.

// Memory that kernels and, between launches, the host see; 64-byte aligned. Aborts the test when it
// is not to be had.
std::byte* AllocateOnTestDevice(int64_t size_bytes);
void FreeOnTestDevice(std::byte* memory);

// Runs of one launch that must give the same bytes. On the CPU they take blocks and threads in
// different orders and cut the grid short.
inline constexpr int kTestDeviceRuns = 3;
void BeginRun(int run);
// Waits for the kernels.
cudaError_t EndRun();

// Forgets all that the tests before did to the device: what they held of it must be gone. `seed`
// draws the order in which the emulated device runs work of several streams.
void ResetTestDevice(uint64_t seed);

// Kernels launched so far in this process; on a GPU, where nobody counts, 0.
int64_t NumLaunches();

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_CUDA_TEST_DEVICE_H_
