// CUDA's functions for graphs, as far as this project calls them.
#include <memory>
#include <mutex>
#include <thread>

#include "tests/kernels/cuda/emulated_runtime_state.h"

using expertmesh::CallEmulated;
using expertmesh::emulated_current_device;
using expertmesh::EmulatedRuntime;
using expertmesh::FailEmulation;
using expertmesh::KnowsEmulated;
using expertmesh::RememberEmulated;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return CallEmulated("cudaStreamBeginCapture", [&](EmulatedRuntime& runtime) {
    if (mode != cudaStreamCaptureModeThreadLocal) {
      FailEmulation("captures of other modes than thread-local are not emulated");
    }
    // The legacy stream cannot be captured.
    if (stream == nullptr) return cudaErrorStreamCaptureUnsupported;
    if (!KnowsEmulated(runtime, stream)) return cudaErrorInvalidResourceHandle;
    if (stream->captured != nullptr) return cudaErrorIllegalState;
    stream->captured = std::make_unique<CUgraph_st>();
    stream->capturing_thread = std::this_thread::get_id();
    stream->capture_is_invalid = false;
    return cudaSuccess;
  });
}

// Whatever it returns, the capture is over.
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  EmulatedRuntime& runtime = expertmesh::TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  *graph = nullptr;
  cudaError_t error = runtime.Enter("cudaStreamEndCapture");
  if (!runtime.Has(stream)) return RememberEmulated(cudaErrorInvalidResourceHandle);
  if (stream->captured == nullptr) return RememberEmulated(cudaErrorIllegalState);
  if (stream->capturing_thread != std::this_thread::get_id()) {
    return RememberEmulated(cudaErrorStreamCaptureWrongThread);
  }
  std::unique_ptr<CUgraph_st> captured = std::move(stream->captured);
  stream->capturing_thread = {};
  if (error == cudaSuccess && stream->capture_is_invalid) {
    error = cudaErrorStreamCaptureInvalidated;
  }
  if (error != cudaSuccess) return RememberEmulated(error);
  *graph = captured.release();
  runtime.graphs.insert(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  EmulatedRuntime& runtime = expertmesh::TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  ++runtime.counts.calls["cudaGraphDestroy"];
  if (runtime.graphs.erase(graph) == 0) return RememberEmulated(cudaErrorInvalidValue);
  delete graph;
  return RememberEmulated(runtime.broken);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return CallEmulated("cudaGraphInstantiate", [&](EmulatedRuntime& runtime) {
    *exec = nullptr;
    if (runtime.graphs.count(graph) == 0) return cudaErrorInvalidValue;
    *exec = new CUgraphExec_st();
    (*exec)->nodes = graph->nodes;
    (*exec)->device = emulated_current_device;
    runtime.graph_execs.insert(*exec);
    return cudaSuccess;
  });
}

// A graph runs in one stream at a time: launched again, it waits for itself.
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return CallEmulated("cudaGraphLaunch", [&](EmulatedRuntime& runtime) {
    if (runtime.graph_execs.count(exec) == 0) return cudaErrorInvalidValue;
    if (!KnowsEmulated(runtime, stream) || exec->device != emulated_current_device) {
      return cudaErrorInvalidResourceHandle;
    }
    if (stream->captured != nullptr) FailEmulation("a graph within a graph is not emulated");
    ++runtime.counts.graph_launches;
    const int64_t number = exec->num_launched++;
    stream->queue.push_back(
        {[exec, number] { return exec->num_passed == number; }, [] { return cudaSuccess; }});
    for (const CUstream_st::Work& node : exec->nodes) stream->queue.push_back(node);
    stream->queue.push_back({nullptr, [exec] {
                               ++exec->num_passed;
                               return cudaSuccess;
                             }});
    return cudaSuccess;
  });
}

// Of a lost context, too.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  EmulatedRuntime& runtime = expertmesh::TheEmulatedRuntime();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  ++runtime.counts.calls["cudaGraphExecDestroy"];
  if (runtime.graph_execs.erase(exec) == 0) return RememberEmulated(cudaErrorInvalidValue);
  if (exec->num_passed != exec->num_launched && runtime.broken == cudaSuccess) {
    FailEmulation("a graph was destroyed before its stream had passed it");
  }
  delete exec;
  return RememberEmulated(runtime.broken);
}
