#include "tests/kernels/cuda/emulated_cuda_runtime.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/kernels/cuda/emulated_runtime_state.h"

namespace expertmesh {

void ResetEmulatedCuda(const EmulatedCudaOptions& options) {
  EmulatedRuntime& runtime = TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  if (!runtime.streams.empty()) FailEmulation("streams were left over");
  if (!runtime.events.empty()) FailEmulation("events were left over");
  if (!runtime.graphs.empty()) FailEmulation("graphs were left over");
  if (!runtime.graph_execs.empty()) FailEmulation("executable graphs were left over");
  if (runtime.memory.num_blocks() != 0) FailEmulation("device memory was left over");
  if (!runtime.pinned.empty()) FailEmulation("pinned memory was left over");
  runtime.options = options;
  runtime.counts = EmulatedCudaCounts();
  runtime.broken = cudaSuccess;
  runtime.hangs = false;
  runtime.random.seed(options.seed);
  runtime.call_failures.clear();
  runtime.work_failure = nullptr;
  runtime.copies_until_corrupt = -1;
  emulated_last_error = cudaSuccess;
}

void FailEmulatedCall(const std::string& function, cudaError_t error, int64_t num_successes) {
  EmulatedRuntime& runtime = TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.call_failures[function] = {error, num_successes};
}

void FailEmulatedWork(cudaError_t error, int64_t num_successes) {
  EmulatedRuntime& runtime = TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.work_failure =
      std::make_unique<EmulatedRuntime::Failure>(EmulatedRuntime::Failure{error, num_successes});
}

void CorruptEmulatedCopy(int64_t num_successes) {
  EmulatedRuntime& runtime = TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.copies_until_corrupt = num_successes;
}

void HangEmulatedDevice(bool hang) {
  EmulatedRuntime& runtime = TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.hangs = hang;
}

EmulatedCudaCounts CountEmulatedCuda() {
  EmulatedRuntime& runtime = TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  EmulatedCudaCounts counts = runtime.counts;
  counts.streams = static_cast<int64_t>(runtime.streams.size());
  counts.events = static_cast<int64_t>(runtime.events.size());
  counts.graph_execs = static_cast<int64_t>(runtime.graph_execs.size());
  for (int device = 0; device < runtime.options.num_devices; ++device) {
    counts.device_bytes += runtime.memory.allocated_bytes(device);
  }
  for (const auto& [data, size_bytes] : runtime.pinned) counts.pinned_bytes += size_bytes;
  return counts;
}

cudaError_t EnqueueEmulatedWork(cudaStream_t stream, std::function<cudaError_t()> run,
                                std::function<bool()> is_ready) {
  return CallEmulated("EnqueueEmulatedWork", [&](EmulatedRuntime& runtime) {
    ++runtime.counts.launches;
    return PushEmulated(runtime, stream, {std::move(is_ready), std::move(run)});
  });
}

void WithEmulatedMemory(const std::function<void()>& access) {
  EmulatedRuntime& runtime = TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.memory.Open();
  access();
  runtime.memory.Close();
}

}  // namespace expertmesh

using expertmesh::CallEmulated;
using expertmesh::emulated_current_device;
using expertmesh::EmulatedRuntime;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated:
      return "cudaErrorStreamCaptureInvalidated";
    default:
      return "cudaError of the emulation";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    default:
      return "emulated";
  }
}

cudaError_t cudaGetLastError() {
  return std::exchange(expertmesh::emulated_last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() { return expertmesh::emulated_last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  return CallEmulated("cudaGetDeviceCount", [&](EmulatedRuntime& runtime) {
    *count = runtime.options.num_devices;
    return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
  });
}

cudaError_t cudaSetDevice(int device) {
  return CallEmulated("cudaSetDevice", [&](EmulatedRuntime& runtime) {
    if (device < 0 || device >= runtime.options.num_devices) return cudaErrorInvalidDevice;
    emulated_current_device = device;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return CallEmulated("cudaGetDevice", [&](EmulatedRuntime&) {
    *device = emulated_current_device;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return CallEmulated("cudaDeviceGetAttribute", [&](EmulatedRuntime& runtime) {
    if (device < 0 || device >= runtime.options.num_devices) return cudaErrorInvalidDevice;
    switch (attribute) {
      case cudaDevAttrComputeCapabilityMajor:
        *value = runtime.options.compute_major;
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMinor:
        *value = runtime.options.compute_minor;
        return cudaSuccess;
      case cudaDevAttrMultiProcessorCount:
        *value = runtime.options.sm_count;
        return cudaSuccess;
      default:
        return cudaErrorInvalidValue;
    }
  });
}

cudaError_t cudaDeviceSynchronize() {
  return CallEmulated("cudaDeviceSynchronize", [](EmulatedRuntime& runtime) {
    cudaError_t error = cudaSuccess;
    for (const cudaStream_t stream : runtime.streams) {
      error = std::max(error, runtime.SpoilCapture(stream));
    }
    if (error != cudaSuccess) return error;
    return runtime.RunUntil([&] { return runtime.IsIdle(); });
  });
}
