// CUDA's functions of streams and events.
#include <algorithm>
#include <mutex>

#include "tests/kernels/cuda/emulated_runtime_state.h"

using expertmesh::CallEmulated;
using expertmesh::emulated_current_device;
using expertmesh::EmulatedRuntime;
using expertmesh::KnowsEmulated;
using expertmesh::PushEmulated;

namespace {

constexpr int kGreatestPriority = -5;  // as GPUs have; the least is 0

}  // namespace

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
    *greatest = kGreatestPriority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int priority) {
  return CallEmulated("cudaStreamCreateWithPriority", [&](EmulatedRuntime& runtime) {
    *stream = new CUstream_st();
    (*stream)->device = emulated_current_device;
    (*stream)->priority = std::clamp(priority, kGreatestPriority, 0);
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
