// Runs CUDA kernels on the CPU: included before the first line of each .cu file that CMake hands to
// the host compiler here (-include). Keywords vanish, indices and barriers come from
// grid_emulation.cc, and cudaLaunchKernelEx on the null stream runs the whole grid before it
// returns. One host thread at a time. Memory that a kernel touches is the process's own, so
// sanitizers see every access.
#ifndef EXPERTMESH_TESTS_KERNELS_CUDA_GRID_EMULATION_H_
#define EXPERTMESH_TESTS_KERNELS_CUDA_GRID_EMULATION_H_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

// CUDA's own headers make the other keywords vanish for a host compiler.
#undef __shared__
#define __shared__ static
#define __launch_bounds__(...)

namespace expertmesh {

// Order in which blocks and the threads of a block take turns: nothing a kernel stores may depend
// on it. 0: ascending; 1: descending; others seed a shuffle for each turn.
void SetEmulatedOrder(uint64_t order);
// Grids are cut to this many blocks in x and y: kernels stride over their grid, so that any grid
// does all the work. 0: not cut.
void SetEmulatedGridLimit(unsigned limit);
// Launches, blocks and kernel threads since the process began.
struct EmulationCounts {
  int64_t launches = 0;
  int64_t blocks = 0;
  int64_t threads = 0;
};
EmulationCounts EmulatedCounts();

// cudaErrorInvalidConfiguration for what no GPU would take (a dimension of 0 among it). Aborts the
// test on a barrier that not every thread of the block reaches, on a shuffle or warp barrier that a
// lane of its mask does not reach in the same operation, and on a read from a lane outside the
// mask.
cudaError_t RunEmulatedGrid(const cudaLaunchConfig_t& config,
                            const std::function<void()>& kernel_thread);
// The same at once on the null stream, and in the order of any other (emulated_cuda_runtime.h).
cudaError_t LaunchEmulatedGrid(const cudaLaunchConfig_t& config,
                               std::function<void()> kernel_thread);

template <class Params>
cudaError_t EmulatedLaunch(const cudaLaunchConfig_t* config, void (*kernel)(Params),
                           const Params& params) {
  return LaunchEmulatedGrid(*config, [params, kernel] { kernel(params); });
}

void EmulatedBlockBarrier();
enum class WarpOperation : uint8_t { kBarrier, kShuffle, kShuffleXor, kShuffleDown, kVote };
void EmulatedWarpBarrier(unsigned mask, WarpOperation operation);
// What `lane` handed in. Lanes outside [0, 32) are the caller's own.
uint64_t EmulatedExchange(unsigned mask, WarpOperation operation, uint64_t bits, int lane);
// One bit per lane of the mask.
unsigned EmulatedVote(unsigned mask, bool vote);
int EmulatedLane();

template <class T>
T EmulatedShuffle(unsigned mask, WarpOperation operation, T value, int lane) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  bits = EmulatedExchange(mask, operation, bits, lane);
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace expertmesh

#define cudaLaunchKernelEx(config, kernel, params) \
  ::expertmesh::EmulatedLaunch(config, kernel, params)

// Those of the kernel thread whose turn it is.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

inline void __syncthreads() { ::expertmesh::EmulatedBlockBarrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  ::expertmesh::EmulatedWarpBarrier(mask, ::expertmesh::WarpOperation::kBarrier);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return ::expertmesh::EmulatedShuffle(mask, ::expertmesh::WarpOperation::kShuffle, value,
                                       lane & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  return ::expertmesh::EmulatedShuffle(mask, ::expertmesh::WarpOperation::kShuffleXor, value,
                                       ::expertmesh::EmulatedLane() ^ step);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned step) {
  return ::expertmesh::EmulatedShuffle(mask, ::expertmesh::WarpOperation::kShuffleDown, value,
                                       ::expertmesh::EmulatedLane() + static_cast<int>(step));
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
  return ::expertmesh::EmulatedVote(mask, vote != 0);
}
inline int __any_sync(unsigned mask, int vote) {
  return ::expertmesh::EmulatedVote(mask, vote != 0) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int vote) {
  return ::expertmesh::EmulatedVote(mask, vote != 0) == mask ? 1 : 0;
}

// Kernel threads take turns at barriers alone, so plain code is atomic.
inline int atomicMin(int* address, int value) {
  const int before = *address;
  if (value < before) *address = value;
  return before;
}

template <class T>
void __stcg(T* address, T value) {
  *address = value;
}

// Compiled with -ffp-contract=off: nothing is fused that is not written so.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline int __float2int_rn(float x) {
  // Saturates, and NaN is 0.
  if (!(x == x)) return 0;
  if (x >= 0x1p31f) return 0x7fffffff;
  if (x < -0x1p31f) return -0x7fffffff - 1;
  return static_cast<int>(std::nearbyintf(x));
}
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

#endif  // EXPERTMESH_TESTS_KERNELS_CUDA_GRID_EMULATION_H_
