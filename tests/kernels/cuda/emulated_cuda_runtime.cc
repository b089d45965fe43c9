#include "tests/kernels/cuda/emulated_cuda_runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/kernels/cuda/emulated_runtime_state.h"

namespace expertmesh {
namespace {

constexpr int kGreatestPriority = -5;  // as GPUs have; the least is 0

}  // namespace

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
using expertmesh::EmulatedCudaCounts;
using expertmesh::EmulatedRuntime;
using expertmesh::KnowsEmulated;
using expertmesh::PushEmulated;

// ---- Errors and devices
// --------------------------------------------------------------------------

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

// ---- Memory
// --------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** data, size_t size) {
  return CallEmulated("cudaMalloc", [&](EmulatedRuntime& runtime) {
    const int64_t size_bytes = static_cast<int64_t>(size);
    *data = nullptr;
    if (size == 0) return cudaSuccess;
    if (size_bytes < 0 ||
        size_bytes > runtime.options.memory_bytes -
                         runtime.memory.allocated_bytes(emulated_current_device)) {
      return cudaErrorMemoryAllocation;
    }
    *data = runtime.memory.Allocate(size_bytes, emulated_current_device);
    return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
  });
}

// Waits for the device, as the real one does, and gives memory back even when the context is lost.
cudaError_t cudaFree(void* data) {
  EmulatedRuntime& runtime = expertmesh::TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  ++runtime.counts.calls["cudaFree"];
  if (data == nullptr) return runtime.broken;
  if (const cudaError_t error = runtime.RefuseDuringCapture("cudaFree"); error != cudaSuccess) {
    return expertmesh::RememberEmulated(error);
  }
  while (!runtime.hangs && runtime.Step()) {
  }
  if (!runtime.memory.Free(static_cast<std::byte*>(data))) {
    return expertmesh::RememberEmulated(cudaErrorInvalidValue);
  }
  return expertmesh::RememberEmulated(runtime.broken);
}

cudaError_t cudaHostAlloc(void** data, size_t size, unsigned int) {
  return CallEmulated("cudaHostAlloc", [&](EmulatedRuntime& runtime) {
    if (size > size_t{1} << 40) return cudaErrorMemoryAllocation;
    *data = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    if (*data == nullptr) return cudaErrorMemoryAllocation;
    std::memset(*data, 0xff, size);
    runtime.pinned.emplace(static_cast<std::byte*>(*data), static_cast<int64_t>(size));
    return cudaSuccess;
  });
}

cudaError_t cudaFreeHost(void* data) {
  EmulatedRuntime& runtime = expertmesh::TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  ++runtime.counts.calls["cudaFreeHost"];
  if (const cudaError_t error = runtime.RefuseDuringCapture("cudaFreeHost"); error != cudaSuccess) {
    return expertmesh::RememberEmulated(error);
  }
  while (!runtime.hangs && runtime.Step()) {
  }
  if (runtime.pinned.erase(static_cast<std::byte*>(data)) == 0) {
    return expertmesh::RememberEmulated(cudaErrorInvalidValue);
  }
  std::free(data);
  return expertmesh::RememberEmulated(runtime.broken);
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return CallEmulated("cudaMemGetInfo", [&](EmulatedRuntime& runtime) {
    const int64_t total = runtime.options.memory_bytes;
    *total_bytes = static_cast<size_t>(total);
    *free_bytes =
        static_cast<size_t>(total - runtime.memory.allocated_bytes(emulated_current_device));
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  return CallEmulated("cudaPointerGetAttributes", [&](EmulatedRuntime& runtime) {
    *attributes = {};
    attributes->type = cudaMemoryTypeUnregistered;
    if (const auto* block = runtime.memory.Find(data); block != nullptr) {
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = block->device;
      attributes->devicePointer = const_cast<void*>(data);
      return cudaSuccess;
    }
    if (runtime.FindPinned(data) != runtime.pinned.end()) {
      attributes->type = cudaMemoryTypeHost;
      attributes->devicePointer = attributes->hostPointer = const_cast<void*>(data);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  return CallEmulated("cudaMemcpyAsync", [&](EmulatedRuntime& runtime) {
    const int64_t size_bytes = static_cast<int64_t>(size);
    if (!runtime.memory.IsWhole(to, size_bytes) || !runtime.memory.IsWhole(from, size_bytes)) {
      return cudaErrorInvalidValue;
    }
    EmulatedCudaCounts& counts = runtime.counts;
    ++counts.copies;
    const bool is_from_device = runtime.memory.Find(from) != nullptr;
    const bool is_to_device = runtime.memory.Find(to) != nullptr;
    for (EmulatedCudaCounts::Copies* copies :
         {is_to_device && !is_from_device ? &counts.host_to_device : nullptr,
          is_from_device && !is_to_device ? &counts.device_to_host : nullptr}) {
      if (copies == nullptr) continue;
      ++copies->number;
      copies->size_bytes += size_bytes;
    }
    if (!runtime.IsReachable(to) || !runtime.IsReachable(from)) ++runtime.counts.pageable_copies;
    const bool is_corrupt =
        runtime.copies_until_corrupt >= 0 && runtime.copies_until_corrupt-- == 0;
    return PushEmulated(runtime, stream, {nullptr, [=] {
                                            std::memcpy(to, from, size);
                                            if (is_corrupt) static_cast<char*>(to)[size - 1] ^= 1;
                                            return cudaSuccess;
                                          }});
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  return CallEmulated("cudaMemsetAsync", [&](EmulatedRuntime& runtime) {
    if (!runtime.memory.IsWhole(to, static_cast<int64_t>(size))) return cudaErrorInvalidValue;
    return PushEmulated(runtime, stream, {nullptr, [=] {
                                            std::memset(to, value, size);
                                            return cudaSuccess;
                                          }});
  });
}

// ---- Streams and events
// --------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  return CallEmulated("cudaStreamCreateWithFlags", [&](EmulatedRuntime& runtime) {
    *stream = new CUstream_st();
    (*stream)->device = emulated_current_device;
    runtime.streams.push_back(*stream);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return CallEmulated("cudaDeviceGetStreamPriorityRange", [&](EmulatedRuntime&) {
    *least = 0;
    *greatest = expertmesh::kGreatestPriority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int priority) {
  return CallEmulated("cudaStreamCreateWithPriority", [&](EmulatedRuntime& runtime) {
    *stream = new CUstream_st();
    (*stream)->device = emulated_current_device;
    (*stream)->priority = std::clamp(priority, expertmesh::kGreatestPriority, 0);
    runtime.streams.push_back(*stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return CallEmulated("cudaStreamGetPriority", [&](EmulatedRuntime& runtime) {
    if (!runtime.Has(stream)) return cudaErrorInvalidResourceHandle;
    *priority = stream->priority;
    return cudaSuccess;
  });
}

// Of a lost context, too.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  EmulatedRuntime& runtime = expertmesh::TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  ++runtime.counts.calls["cudaStreamDestroy"];
  if (!runtime.Has(stream)) return cudaErrorInvalidResourceHandle;
  if (stream->captured != nullptr) {
    expertmesh::FailEmulation("a stream was destroyed while it captured");
  }
  if (!stream->queue.empty()) expertmesh::FailEmulation("a stream was destroyed with work in it");
  runtime.streams.erase(std::find(runtime.streams.begin(), runtime.streams.end(), stream));
  delete stream;
  return expertmesh::RememberEmulated(runtime.broken);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return CallEmulated("cudaStreamSynchronize", [&](EmulatedRuntime& runtime) {
    if (!runtime.Has(stream)) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = runtime.SpoilCapture(stream); error != cudaSuccess) return error;
    return runtime.RunUntil([&] { return stream->queue.empty(); });
  });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return CallEmulated("cudaStreamQuery", [&](EmulatedRuntime& runtime) {
    if (!runtime.Has(stream)) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = runtime.SpoilCapture(stream); error != cudaSuccess) return error;
    runtime.Step();
    if (runtime.broken != cudaSuccess) return runtime.broken;
    return stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  return CallEmulated("cudaEventCreateWithFlags", [&](EmulatedRuntime& runtime) {
    *event = new CUevent_st();
    (*event)->device = emulated_current_device;
    runtime.events.insert(*event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  EmulatedRuntime& runtime = expertmesh::TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  ++runtime.counts.calls["cudaEventDestroy"];
  if (runtime.events.erase(event) == 0) return cudaErrorInvalidResourceHandle;
  if (!event->progress->is_reached() && runtime.broken == cudaSuccess) {
    expertmesh::FailEmulation("an event was destroyed while it was pending");
  }
  delete event;
  return expertmesh::RememberEmulated(runtime.broken);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return CallEmulated("cudaEventRecord", [&](EmulatedRuntime& runtime) {
    if (runtime.events.count(event) == 0 || event->device != emulated_current_device) {
      return cudaErrorInvalidResourceHandle;
    }
    if (!KnowsEmulated(runtime, stream)) return cudaErrorInvalidResourceHandle;
    if (stream->captured != nullptr) {
      expertmesh::FailEmulation("events within a capture are not emulated");
    }
    const int64_t number = ++event->progress->num_recorded;
    return PushEmulated(runtime, stream, {nullptr, [progress = event->progress, number] {
                                            progress->num_reached =
                                                std::max(progress->num_reached, number);
                                            return cudaSuccess;
                                          }});
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return CallEmulated("cudaEventQuery", [&](EmulatedRuntime& runtime) {
    if (runtime.events.count(event) == 0) return cudaErrorInvalidResourceHandle;
    runtime.Step();
    if (runtime.broken != cudaSuccess) return runtime.broken;
    return event->progress->is_reached() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return CallEmulated("cudaEventSynchronize", [&](EmulatedRuntime& runtime) {
    if (runtime.events.count(event) == 0) return cudaErrorInvalidResourceHandle;
    return runtime.RunUntil([&] { return event->progress->is_reached(); });
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  return CallEmulated("cudaStreamWaitEvent", [&](EmulatedRuntime& runtime) {
    if (runtime.events.count(event) == 0) return cudaErrorInvalidResourceHandle;
    if (runtime.Has(stream) && stream->captured != nullptr) {
      expertmesh::FailEmulation("events within a capture are not emulated");
    }
    const int64_t number = event->progress->num_recorded;
    return PushEmulated(
        runtime, stream,
        {[progress = event->progress, number] { return progress->num_reached >= number; },
         [] { return cudaSuccess; }});
  });
}
