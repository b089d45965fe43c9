#include "kernels/cuda/cuda_graph_cache.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/cuda/cuda_status.h"

namespace expertmesh {

void CudaGraphErrors::SetListener(std::function<void(const absl::Status&)> listener) {
  const std::lock_guard<std::mutex> lock(mutex_);
  listener_ = std::move(listener);
  if (listener_ != nullptr && !first_.ok()) listener_(first_);
}

void CudaGraphErrors::Add(const absl::Status& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!first_.ok()) return;
  first_ = error;
  if (listener_ != nullptr) listener_(first_);
}

CudaGraphCache::CudaGraphCache(int32_t device_index, std::shared_ptr<CudaGraphErrors> errors)
    : device_index_(device_index), errors_(std::move(errors)) {}

CudaGraphCache::~CudaGraphCache() {
  // A lost device has nothing left to wait for.
  static_cast<void>(UseCudaDevice(device_index_));
  retired_.splice(retired_.end(), graphs_);
  for (Graph& graph : retired_) {
    static_cast<void>(cudaEventSynchronize(graph.passed));
    Destroy(graph);
  }
  static_cast<void>(cudaGetLastError());
}

absl::Status CudaGraphCache::Launch(const CudaGraphKey& key, cudaStream_t stream,
                                    absl::FunctionRef<absl::Status(cudaStream_t)> launch) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!retired_.empty()) DestroyPassed();
    Graph* const graph = FindOrCapture(key, stream, launch);
    if (graph != nullptr) {
      const cudaError_t error = cudaGraphLaunch(graph->exec, stream);
      const absl::Status launched = CudaStatus(error, "cudaGraphLaunch", device_index_);
      if (launched.ok()) {
        absl::Status marked = CudaStatus(cudaEventRecord(graph->passed, stream),
                                         "cudaEventRecord behind a graph", device_index_);
        // Without its mark nobody would know when the graph may go.
        if (!marked.ok()) static_cast<void>(cudaStreamSynchronize(stream));
        return marked;
      }
      // Front: FindOrCapture put it there.
      retired_.splice(retired_.end(), graphs_, graphs_.begin());
      if (IsStickyCudaError(error)) return launched;
      TakeError(launched);
    }
  }
  return launch(stream);
}

CudaGraphCache::Graph* CudaGraphCache::FindOrCapture(
    const CudaGraphKey& key, cudaStream_t stream,
    absl::FunctionRef<absl::Status(cudaStream_t)> launch) {
  const auto found = std::find_if(graphs_.begin(), graphs_.end(),
                                  [&key](const Graph& graph) { return graph.key == key; });
  if (found != graphs_.end()) {
    graphs_.splice(graphs_.begin(), graphs_, found);
    return &graphs_.front();
  }
  if (pause_ > 0) {
    --pause_;
    return nullptr;
  }
  if (!captures_ || !WasSeen(key)) return nullptr;
  Graph graph;
  if (const absl::Status status = Capture(stream, launch, graph); !status.ok()) {
    // A lost device answers everything so: the launch without a graph says it.
    const bool is_lost = IsStickyCudaError(cudaStreamQuery(stream));
    static_cast<void>(cudaGetLastError());
    if (!is_lost) TakeError(status);
    return nullptr;
  }
  graph.key = key;
  graphs_.push_front(std::move(graph));
  if (graphs_.size() > kMaxGraphs) {
    retired_.splice(retired_.end(), graphs_, std::prev(graphs_.end()));
  }
  return &graphs_.front();
}

bool CudaGraphCache::WasSeen(const CudaGraphKey& key) {
  const auto seen = std::find(seen_.begin(), seen_.end(), key);
  if (seen != seen_.end()) {
    seen_.erase(seen);
    return true;
  }
  seen_.push_back(key);
  if (seen_.size() > kMaxSeen) seen_.pop_front();
  return false;
}

absl::Status CudaGraphCache::Capture(cudaStream_t stream,
                                     absl::FunctionRef<absl::Status(cudaStream_t)> launch,
                                     Graph& graph) const {
  // Thread-local: other threads allocate and poll meanwhile.
  absl::Status status = CudaStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                                   "cudaStreamBeginCapture", device_index_);
  if (!status.ok()) return status;
  status = launch(stream);
  cudaGraph_t captured = nullptr;
  // Always, or the stream would go on capturing.
  status.Update(
      CudaStatus(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture", device_index_));
  if (status.ok()) {
    status = CudaStatus(cudaEventCreateWithFlags(&graph.passed, cudaEventDisableTiming),
                        "cudaEventCreateWithFlags", device_index_);
  }
  if (status.ok()) {
    status = CudaStatus(cudaGraphInstantiate(&graph.exec, captured, 0), "cudaGraphInstantiate",
                        device_index_);
  }
  if (captured != nullptr) static_cast<void>(cudaGraphDestroy(captured));
  if (!status.ok()) Destroy(graph);
  return status;
}

void CudaGraphCache::TakeError(const absl::Status& error) {
  if (absl::IsResourceExhausted(error)) {
    pause_ = kPauseLaunches;
    const size_t num_kept = graphs_.size() / 2;
    while (graphs_.size() > num_kept) {
      retired_.splice(retired_.end(), graphs_, std::prev(graphs_.end()));
    }
    return;
  }
  captures_ = false;
  seen_.clear();
  if (errors_ != nullptr) errors_->Add(error);
}

void CudaGraphCache::DestroyPassed() {
  for (auto graph = retired_.begin(); graph != retired_.end();) {
    const auto next = std::next(graph);
    if (cudaEventQuery(graph->passed) != cudaErrorNotReady) {
      Destroy(*graph);
      retired_.erase(graph);
    }
    graph = next;
  }
  // "Not ready" would be found after an unrelated call.
  static_cast<void>(cudaGetLastError());
}

// What fails here has nobody left to tell.
void CudaGraphCache::Destroy(Graph& graph) {
  if (graph.exec != nullptr) static_cast<void>(cudaGraphExecDestroy(graph.exec));
  if (graph.passed != nullptr) static_cast<void>(cudaEventDestroy(graph.passed));
  graph.exec = nullptr;
  graph.passed = nullptr;
}

}  // namespace expertmesh
