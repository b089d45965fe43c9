#ifndef EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_CUDA_RUNTIME_H_
#define EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_CUDA_RUNTIME_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

// emulated_cuda_runtime.cc defines CUDA's own functions (those that this project calls), so that
// code over cuda_runtime_api.h runs unchanged in tests:
//   memory    device memory faults (SIGSEGV) at every access but those of work that a stream runs;
//             new memory is 0xff; each block ends at a guard page
//   streams   work runs as late as it may: when somebody asks (cudaEventQuery, ...Synchronize,
//             cudaFree), on that thread, and then a random stream's next piece, drawn by a seed. So
//             what is missing a wait meets poison or old bytes
//   kernels   run by the grid emulation (grid_emulation.h) where that is linked
//   graphs    of a capture in thread-local mode: a stream's work, recorded, and run piece by piece
//             where the graph is launched; what CUDA forbids during a capture fails and spoils it
//   errors    injected by the functions below; "not ready" is one that cudaGetLastError tells of
// Thread safe.
namespace expertmesh {

struct EmulatedCudaOptions {
  int num_devices = 1;
  int64_t memory_bytes = int64_t{1} << 30;  // of each device
  int sm_count = 132;
  int compute_major = 9;
  int compute_minor = 0;
  uint64_t seed = 1;
};

// Starts from anew, with nothing broken. Aborts the test when streams, events or memory of before
// are still there.
void ResetEmulatedCuda(const EmulatedCudaOptions& options = {});

// After `num_successes` more of them, the next call of this function ("cudaMalloc") fails so, once.
// A sticky error breaks the device.
void FailEmulatedCall(const std::string& function, cudaError_t error, int64_t num_successes = 0);
// After `num_successes` more pieces of work the next one fails so and breaks the device: every
// later call fails, as with a lost context.
void FailEmulatedWork(cudaError_t error, int64_t num_successes = 0);
// After `num_successes` more copies the next one flips a bit of its last byte.
void CorruptEmulatedCopy(int64_t num_successes = 0);
// While the device hangs none of its work runs.
void HangEmulatedDevice(bool hang);

struct EmulatedCudaCounts {
  int64_t streams = 0;  // alive
  int64_t events = 0;
  int64_t graph_execs = 0;
  int64_t device_bytes = 0;
  int64_t pinned_bytes = 0;
  // Since the reset:
  int64_t work_done = 0;
  struct Copies {
    int64_t number = 0;
    int64_t size_bytes = 0;
  };
  int64_t copies = 0;
  Copies host_to_device;  // of them
  Copies device_to_host;
  int64_t pageable_copies = 0;  // of them, to or from host memory that is not pinned: they block
  int64_t launches = 0;         // of kernels, captured ones included; not those that graphs launch
  int64_t graph_launches = 0;
  std::map<std::string, int64_t> calls;  // by function; "cudaLaunchKernelExC" is `launches`
  int64_t Calls(const std::string& function) const {
    const auto found = calls.find(function);
    return found == calls.end() ? 0 : found->second;
  }
  // Of all functions but those of the last error and cudaSetDevice, which each thread of a stream
  // calls once it gets to run; a kernel's launch is one.
  int64_t AllCalls() const {
    int64_t count = -Calls("cudaSetDevice");
    for (const auto& [function, number] : calls) count += number;
    return count;
  }
};
EmulatedCudaCounts CountEmulatedCuda();

// Work of a test's own in a stream's order: `run` when `is_ready` (null: at once) first says so.
// Neither may call CUDA.
cudaError_t EnqueueEmulatedWork(cudaStream_t stream, std::function<cudaError_t()> run,
                                std::function<bool()> is_ready = nullptr);

// Runs `access` as a kernel would: with device memory open.
void WithEmulatedMemory(const std::function<void()>& access);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_CUDA_RUNTIME_H_
