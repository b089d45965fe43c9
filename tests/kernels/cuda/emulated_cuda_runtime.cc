#include "tests/kernels/cuda/emulated_cuda_runtime.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/emulated_memory.h"

// What CUDA's opaque handles point at.
struct CUevent_st {
  // Outlives the event in the work of streams that wait for it.
  struct Progress {
    int64_t num_recorded = 0;
    int64_t num_reached = 0;
    bool is_reached() const { return num_reached == num_recorded; }
  };
  int device = 0;
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
};

struct CUstream_st {
  struct Work {
    std::function<bool()> is_ready;  // null: at once
    std::function<cudaError_t()> run;
  };
  int device = 0;
  int priority = 0;
  std::deque<Work> queue;
};

namespace expertmesh {
namespace {

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "emulated CUDA runtime: %s\n", what);
  std::abort();
}

constexpr int kGreatestPriority = -5;  // as GPUs have; the least is 0

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

class Runtime {
 public:
  std::mutex mutex;  // of everything below
  EmulatedCudaOptions options;
  EmulatedMemory memory;
  std::map<std::byte*, int64_t> pinned;
  std::vector<cudaStream_t> streams;  // in the order of their creation
  std::set<cudaEvent_t> events;
  EmulatedCudaCounts counts;
  cudaError_t broken = cudaSuccess;
  bool hangs = false;
  std::mt19937_64 random;
  struct Failure {
    cudaError_t error;
    int64_t num_successes;
  };
  std::map<std::string, Failure> call_failures;
  std::unique_ptr<Failure> work_failure;
  int64_t copies_until_corrupt = -1;  // -1: never

  // The error that this call is to fail with.
  cudaError_t Enter(const char* function) {
    ++counts.calls[function];
    if (broken != cudaSuccess) return broken;
    const auto found = call_failures.find(function);
    if (found == call_failures.end() || found->second.num_successes-- > 0) return cudaSuccess;
    const cudaError_t error = found->second.error;
    call_failures.erase(found);
    return error;
  }

  bool Has(cudaStream_t stream) const {
    return std::find(streams.begin(), streams.end(), stream) != streams.end();
  }

  // The pinned block that `data` stands in; pinned.end() without one.
  std::map<std::byte*, int64_t>::const_iterator FindPinned(const void* data) const {
    std::byte* const address = static_cast<std::byte*>(const_cast<void*>(data));
    auto next = pinned.upper_bound(address);
    if (next == pinned.begin() || address >= std::prev(next)->first + std::prev(next)->second) {
      return pinned.end();
    }
    return std::prev(next);
  }

  bool IsReachable(const void* data) const {
    return memory.Find(data) != nullptr || FindPinned(data) != pinned.end();
  }

  bool IsRunnable(cudaStream_t stream) const {
    if (hangs || broken != cudaSuccess || stream->queue.empty()) return false;
    const CUstream_st::Work& front = stream->queue.front();
    return front.is_ready == nullptr || front.is_ready();
  }

  // One piece of work of some stream; false when none can run.
  bool Step() {
    std::vector<cudaStream_t> runnable;
    for (const cudaStream_t stream : streams) {
      if (IsRunnable(stream)) runnable.push_back(stream);
    }
    if (runnable.empty()) return false;
    const cudaStream_t stream = runnable[random() % runnable.size()];
    CUstream_st::Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    ++counts.work_done;
    if (work_failure != nullptr && work_failure->num_successes-- <= 0) {
      Break(work_failure->error);
      work_failure = nullptr;
      return true;
    }
    memory.Open();
    const cudaError_t error = work.run();
    memory.Close();
    if (error != cudaSuccess) Break(error);
    return true;
  }

  void Break(cudaError_t error) {
    broken = error;
    for (const cudaStream_t stream : streams) stream->queue.clear();
  }

  // Until `is_done`; a host that waits for what will never come has a bug.
  template <class IsDone>
  cudaError_t RunUntil(IsDone is_done) {
    while (broken == cudaSuccess && !is_done()) {
      if (hangs) Fail("a blocking call on a device that hangs");
      if (!Step()) Fail("a blocking call for work that waits for what was never enqueued");
    }
    return broken;
  }

  bool IsIdle() const {
    return std::all_of(streams.begin(), streams.end(),
                       [](cudaStream_t stream) { return stream->queue.empty(); });
  }
};

Runtime& TheRuntime() {
  static Runtime* const runtime = new Runtime();
  return *runtime;
}

cudaError_t Remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// Runs `body` of the function under the lock, unless it is to fail.
template <class Body>
cudaError_t Call(const char* function, Body body) {
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  cudaError_t error = runtime.Enter(function);
  if (error == cudaSuccess) error = body(runtime);
  return Remember(error);
}

bool Knows(const Runtime& runtime, cudaStream_t stream) {
  return runtime.Has(stream) && stream->device == current_device;
}

cudaError_t Push(Runtime& runtime, cudaStream_t stream, CUstream_st::Work work) {
  if (!Knows(runtime, stream)) return cudaErrorInvalidResourceHandle;
  stream->queue.push_back(std::move(work));
  return cudaSuccess;
}

}  // namespace

void ResetEmulatedCuda(const EmulatedCudaOptions& options) {
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  if (!runtime.streams.empty()) Fail("streams were left over");
  if (!runtime.events.empty()) Fail("events were left over");
  if (runtime.memory.num_blocks() != 0) Fail("device memory was left over");
  if (!runtime.pinned.empty()) Fail("pinned memory was left over");
  runtime.options = options;
  runtime.counts = EmulatedCudaCounts();
  runtime.broken = cudaSuccess;
  runtime.hangs = false;
  runtime.random.seed(options.seed);
  runtime.call_failures.clear();
  runtime.work_failure = nullptr;
  runtime.copies_until_corrupt = -1;
  last_error = cudaSuccess;
}

void FailEmulatedCall(const std::string& function, cudaError_t error, int64_t num_successes) {
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.call_failures[function] = {error, num_successes};
}

void FailEmulatedWork(cudaError_t error, int64_t num_successes) {
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.work_failure = std::make_unique<Runtime::Failure>(Runtime::Failure{error, num_successes});
}

void CorruptEmulatedCopy(int64_t num_successes) {
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.copies_until_corrupt = num_successes;
}

void HangEmulatedDevice(bool hang) {
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.hangs = hang;
}

EmulatedCudaCounts CountEmulatedCuda() {
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  EmulatedCudaCounts counts = runtime.counts;
  counts.streams = static_cast<int64_t>(runtime.streams.size());
  counts.events = static_cast<int64_t>(runtime.events.size());
  for (int device = 0; device < runtime.options.num_devices; ++device) {
    counts.device_bytes += runtime.memory.allocated_bytes(device);
  }
  for (const auto& [data, size_bytes] : runtime.pinned) counts.pinned_bytes += size_bytes;
  return counts;
}

cudaError_t EnqueueEmulatedWork(cudaStream_t stream, std::function<cudaError_t()> run,
                                std::function<bool()> is_ready) {
  return Call("EnqueueEmulatedWork", [&](Runtime& runtime) {
    ++runtime.counts.launches;
    return Push(runtime, stream, {std::move(is_ready), std::move(run)});
  });
}

void WithEmulatedMemory(const std::function<void()>& access) {
  Runtime& runtime = TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  runtime.memory.Open();
  access();
  runtime.memory.Close();
}

}  // namespace expertmesh

using expertmesh::Call;
using expertmesh::current_device;
using expertmesh::EmulatedCudaCounts;
using expertmesh::Knows;
using expertmesh::Push;
using expertmesh::Runtime;

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

cudaError_t cudaGetLastError() { return std::exchange(expertmesh::last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return expertmesh::last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  return Call("cudaGetDeviceCount", [&](Runtime& runtime) {
    *count = runtime.options.num_devices;
    return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
  });
}

cudaError_t cudaSetDevice(int device) {
  return Call("cudaSetDevice", [&](Runtime& runtime) {
    if (device < 0 || device >= runtime.options.num_devices) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return Call("cudaGetDevice", [&](Runtime&) {
    *device = current_device;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return Call("cudaDeviceGetAttribute", [&](Runtime& runtime) {
    if (device < 0 || device >= runtime.options.num_devices) return cudaErrorInvalidDevice;
    switch (attribute) {
      case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
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
  return Call("cudaDeviceSynchronize",
              [](Runtime& runtime) { return runtime.RunUntil([&] { return runtime.IsIdle(); }); });
}

// ---- Memory
// --------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** data, size_t size) {
  return Call("cudaMalloc", [&](Runtime& runtime) {
    const int64_t size_bytes = static_cast<int64_t>(size);
    *data = nullptr;
    if (size == 0) return cudaSuccess;
    if (size_bytes < 0 || size_bytes > runtime.options.memory_bytes -
                                           runtime.memory.allocated_bytes(current_device)) {
      return cudaErrorMemoryAllocation;
    }
    *data = runtime.memory.Allocate(size_bytes, current_device);
    return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
  });
}

// Waits for the device, as the real one does, and gives memory back even when the context is lost.
cudaError_t cudaFree(void* data) {
  Runtime& runtime = expertmesh::TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  ++runtime.counts.calls["cudaFree"];
  if (data == nullptr) return runtime.broken;
  while (!runtime.hangs && runtime.Step()) {
  }
  if (!runtime.memory.Free(static_cast<std::byte*>(data))) {
    return expertmesh::Remember(cudaErrorInvalidValue);
  }
  return expertmesh::Remember(runtime.broken);
}

cudaError_t cudaHostAlloc(void** data, size_t size, unsigned int) {
  return Call("cudaHostAlloc", [&](Runtime& runtime) {
    if (size > size_t{1} << 40) return cudaErrorMemoryAllocation;
    *data = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    if (*data == nullptr) return cudaErrorMemoryAllocation;
    std::memset(*data, 0xff, size);
    runtime.pinned.emplace(static_cast<std::byte*>(*data), static_cast<int64_t>(size));
    return cudaSuccess;
  });
}

cudaError_t cudaFreeHost(void* data) {
  Runtime& runtime = expertmesh::TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  ++runtime.counts.calls["cudaFreeHost"];
  while (!runtime.hangs && runtime.Step()) {
  }
  if (runtime.pinned.erase(static_cast<std::byte*>(data)) == 0) {
    return expertmesh::Remember(cudaErrorInvalidValue);
  }
  std::free(data);
  return expertmesh::Remember(runtime.broken);
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return Call("cudaMemGetInfo", [&](Runtime& runtime) {
    const int64_t total = runtime.options.memory_bytes;
    *total_bytes = static_cast<size_t>(total);
    *free_bytes = static_cast<size_t>(total - runtime.memory.allocated_bytes(current_device));
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  return Call("cudaPointerGetAttributes", [&](Runtime& runtime) {
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
  return Call("cudaMemcpyAsync", [&](Runtime& runtime) {
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
    return Push(runtime, stream, {nullptr, [=] {
                                    std::memcpy(to, from, size);
                                    if (is_corrupt) static_cast<char*>(to)[size - 1] ^= 1;
                                    return cudaSuccess;
                                  }});
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  return Call("cudaMemsetAsync", [&](Runtime& runtime) {
    if (!runtime.memory.IsWhole(to, static_cast<int64_t>(size))) return cudaErrorInvalidValue;
    return Push(runtime, stream, {nullptr, [=] {
                                    std::memset(to, value, size);
                                    return cudaSuccess;
                                  }});
  });
}

// ---- Streams and events
// --------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  return Call("cudaStreamCreateWithFlags", [&](Runtime& runtime) {
    *stream = new CUstream_st();
    (*stream)->device = current_device;
    runtime.streams.push_back(*stream);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return Call("cudaDeviceGetStreamPriorityRange", [&](Runtime&) {
    *least = 0;
    *greatest = expertmesh::kGreatestPriority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int priority) {
  return Call("cudaStreamCreateWithPriority", [&](Runtime& runtime) {
    *stream = new CUstream_st();
    (*stream)->device = current_device;
    (*stream)->priority = std::clamp(priority, expertmesh::kGreatestPriority, 0);
    runtime.streams.push_back(*stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return Call("cudaStreamGetPriority", [&](Runtime& runtime) {
    if (!runtime.Has(stream)) return cudaErrorInvalidResourceHandle;
    *priority = stream->priority;
    return cudaSuccess;
  });
}

// Of a lost context, too.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Runtime& runtime = expertmesh::TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  ++runtime.counts.calls["cudaStreamDestroy"];
  if (!runtime.Has(stream)) return cudaErrorInvalidResourceHandle;
  if (!stream->queue.empty()) expertmesh::Fail("a stream was destroyed with work in it");
  runtime.streams.erase(std::find(runtime.streams.begin(), runtime.streams.end(), stream));
  delete stream;
  return expertmesh::Remember(runtime.broken);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return Call("cudaStreamSynchronize", [&](Runtime& runtime) {
    if (!runtime.Has(stream)) return cudaErrorInvalidResourceHandle;
    return runtime.RunUntil([&] { return stream->queue.empty(); });
  });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return Call("cudaStreamQuery", [&](Runtime& runtime) {
    if (!runtime.Has(stream)) return cudaErrorInvalidResourceHandle;
    runtime.Step();
    if (runtime.broken != cudaSuccess) return runtime.broken;
    return stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  return Call("cudaEventCreateWithFlags", [&](Runtime& runtime) {
    *event = new CUevent_st();
    (*event)->device = current_device;
    runtime.events.insert(*event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Runtime& runtime = expertmesh::TheRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  ++runtime.counts.calls["cudaEventDestroy"];
  if (runtime.events.erase(event) == 0) return cudaErrorInvalidResourceHandle;
  if (!event->progress->is_reached() && runtime.broken == cudaSuccess) {
    expertmesh::Fail("an event was destroyed while it was pending");
  }
  delete event;
  return expertmesh::Remember(runtime.broken);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return Call("cudaEventRecord", [&](Runtime& runtime) {
    if (runtime.events.count(event) == 0 || event->device != current_device) {
      return cudaErrorInvalidResourceHandle;
    }
    if (!Knows(runtime, stream)) return cudaErrorInvalidResourceHandle;
    const int64_t number = ++event->progress->num_recorded;
    return Push(runtime, stream, {nullptr, [progress = event->progress, number] {
                                    progress->num_reached = std::max(progress->num_reached, number);
                                    return cudaSuccess;
                                  }});
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return Call("cudaEventQuery", [&](Runtime& runtime) {
    if (runtime.events.count(event) == 0) return cudaErrorInvalidResourceHandle;
    runtime.Step();
    if (runtime.broken != cudaSuccess) return runtime.broken;
    return event->progress->is_reached() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return Call("cudaEventSynchronize", [&](Runtime& runtime) {
    if (runtime.events.count(event) == 0) return cudaErrorInvalidResourceHandle;
    return runtime.RunUntil([&] { return event->progress->is_reached(); });
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  return Call("cudaStreamWaitEvent", [&](Runtime& runtime) {
    if (runtime.events.count(event) == 0) return cudaErrorInvalidResourceHandle;
    const int64_t number = event->progress->num_recorded;
    return Push(runtime, stream,
                {[progress = event->progress, number] { return progress->num_reached >= number; },
                 [] { return cudaSuccess; }});
  });
}
