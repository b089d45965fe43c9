// CUDA's functions of memory: what they move is in emulated_memory.h.
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "tests/kernels/cuda/emulated_runtime_state.h"

using expertmesh::CallEmulated;
using expertmesh::emulated_current_device;
using expertmesh::EmulatedCudaCounts;
using expertmesh::EmulatedRuntime;
using expertmesh::PushEmulated;

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
