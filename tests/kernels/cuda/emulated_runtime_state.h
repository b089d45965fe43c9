#ifndef EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_RUNTIME_STATE_H_
#define EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_RUNTIME_STATE_H_

// The inside of the emulated runtime, for the files that define CUDA's functions alone.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/emulated_cuda_runtime.h"
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

struct CUgraph_st;

struct CUstream_st {
  struct Work {
    std::function<bool()> is_ready;  // null: at once
    std::function<cudaError_t()> run;
  };
  int device = 0;
  int priority = 0;
  std::deque<Work> queue;
  // What is enqueued between cudaStreamBeginCapture and ...EndCapture goes here instead.
  std::unique_ptr<CUgraph_st> captured;
  std::thread::id capturing_thread;
  bool capture_is_invalid = false;
};

// A stream's work, recorded.
struct CUgraph_st {
  std::vector<CUstream_st::Work> nodes;
};

struct CUgraphExec_st {
  std::vector<CUstream_st::Work> nodes;
  int device = 0;
  int64_t num_launched = 0;
  int64_t num_passed = 0;
};

namespace expertmesh {

[[noreturn]] inline void FailEmulation(const char* what) {
  std::fprintf(stderr, "emulated CUDA runtime: %s\n", what);
  std::abort();
}

inline thread_local int emulated_current_device = 0;
inline thread_local cudaError_t emulated_last_error = cudaSuccess;

class EmulatedRuntime {
 public:
  std::mutex mutex;  // of everything below
  EmulatedCudaOptions options;
  EmulatedMemory memory;
  std::map<std::byte*, int64_t> pinned;
  std::vector<cudaStream_t> streams;  // in the order of their creation
  std::set<cudaEvent_t> events;
  std::set<cudaGraph_t> graphs;
  std::set<cudaGraphExec_t> graph_execs;
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
    if (const cudaError_t error = RefuseDuringCapture(function); error != cudaSuccess) return error;
    const auto found = call_failures.find(function);
    if (found == call_failures.end() || found->second.num_successes-- > 0) return cudaSuccess;
    const cudaError_t error = found->second.error;
    call_failures.erase(found);
    // Of those that are sticky.
    if (error == cudaErrorIllegalAddress) Break(error);
    return error;
  }

  // What a thread may not do while it captures (thread-local mode), lest the graph should miss it.
  // Whoever tries spoils the capture.
  cudaError_t RefuseDuringCapture(const char* function) {
    static const std::set<std::string> refused = {"cudaMalloc",
                                                  "cudaFree",
                                                  "cudaHostAlloc",
                                                  "cudaFreeHost",
                                                  "cudaDeviceSynchronize",
                                                  "cudaStreamSynchronize",
                                                  "cudaStreamQuery",
                                                  "cudaEventSynchronize",
                                                  "cudaEventQuery"};
    cudaError_t error = cudaSuccess;
    if (refused.count(function) == 0) return error;
    for (const cudaStream_t stream : streams) {
      if (stream->capturing_thread == std::this_thread::get_id()) error = SpoilCapture(stream);
    }
    return error;
  }

  // Of a stream that captures nobody may ask whether it is done.
  cudaError_t SpoilCapture(cudaStream_t stream) {
    if (stream->captured == nullptr) return cudaSuccess;
    stream->capture_is_invalid = true;
    return cudaErrorStreamCaptureUnsupported;
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
      if (hangs) FailEmulation("a blocking call on a device that hangs");
      if (!Step()) FailEmulation("a blocking call for work that waits for what was never enqueued");
    }
    return broken;
  }

  bool IsIdle() const {
    return std::all_of(streams.begin(), streams.end(),
                       [](cudaStream_t stream) { return stream->queue.empty(); });
  }
};

inline EmulatedRuntime& TheEmulatedRuntime() {
  static auto* const runtime = new EmulatedRuntime();
  return *runtime;
}

inline cudaError_t RememberEmulated(cudaError_t error) {
  if (error != cudaSuccess) emulated_last_error = error;
  return error;
}

// Runs `body` of the function under the lock, unless it is to fail.
template <class Body>
cudaError_t CallEmulated(const char* function, Body body) {
  EmulatedRuntime& runtime = TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  cudaError_t error = runtime.Enter(function);
  if (error == cudaSuccess) error = body(runtime);
  return RememberEmulated(error);
}

inline bool KnowsEmulated(const EmulatedRuntime& runtime, cudaStream_t stream) {
  return runtime.Has(stream) && stream->device == emulated_current_device;
}

inline cudaError_t PushEmulated(EmulatedRuntime& runtime, cudaStream_t stream,
                                CUstream_st::Work work) {
  if (!KnowsEmulated(runtime, stream)) return cudaErrorInvalidResourceHandle;
  if (stream->captured == nullptr) {
    stream->queue.push_back(std::move(work));
  } else if (stream->capture_is_invalid) {
    return cudaErrorStreamCaptureInvalidated;
  } else {
    stream->captured->nodes.push_back(std::move(work));
  }
  return cudaSuccess;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_RUNTIME_STATE_H_
