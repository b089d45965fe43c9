#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_GRAPH_CACHE_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_GRAPH_CACHE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace expertmesh {

// Everything that launches bake in: those of equal keys enqueue the same work.
using CudaGraphKey = std::vector<uint64_t>;

// Where caches say that they can have no graphs, which costs time but nothing else: code here does
// not log. Thread safe.
class CudaGraphErrors {
 public:
  // Hears of the first error, whenever that was; on the thread that met it. Must not block.
  void SetListener(std::function<void(const absl::Status&)> listener);
  void Add(const absl::Status& error);

 private:
  std::mutex mutex_;
  std::function<void(const absl::Status&)> listener_;
  absl::Status first_;
};

// CUDA graphs of launches that come again. Those of a key are enqueued one by one the first time,
// captured into a graph the second time, and from then on launched as that graph: one call of the
// host instead of several for each kernel.
//   bounds     the kMaxGraphs graphs that were used last; the kMaxSeen keys that were seen once
//   last lifetime   a graph is destroyed when the device has passed its last launch, which an event
//              behind each launch tells; destruction of the cache waits for that
//   errors     launches without a graph go on as before, and so do graphs that it has, until one
//              cannot be launched. Without memory for a graph it gives up half of those it has and
//              captures again some launches later. Another error makes it capture no more. That of
//              a lost device is the launch's own
// Thread safe: launches of different streams may come at once, those of one stream one at a time.
class CudaGraphCache {
 public:
  // Each layer has a cache: for two lanes and a few sizes of a step.
  static constexpr size_t kMaxGraphs = 8;
  static constexpr size_t kMaxSeen = 16;
  // Without a graph, before it captures again after it had no memory.
  static constexpr int64_t kPauseLaunches = 64;

  // `errors` may be null.
  CudaGraphCache(int32_t device_index, std::shared_ptr<CudaGraphErrors> errors);
  ~CudaGraphCache();
  CudaGraphCache(const CudaGraphCache&) = delete;
  CudaGraphCache& operator=(const CudaGraphCache&) = delete;

  // Enqueues on `stream`, of the device, which must be current, what launch(stream) does: kernels
  // alone, whose memory must live until the stream has passed them. `launch` neither waits nor
  // allocates, and is called at most twice. Not blocking. The error is that of `launch` or, with a
  // graph, of the mark behind it.
  absl::Status Launch(const CudaGraphKey& key, cudaStream_t stream,
                      absl::FunctionRef<absl::Status(cudaStream_t)> launch);

 private:
  struct Graph {
    CudaGraphKey key;
    cudaGraphExec_t exec = nullptr;
    cudaEvent_t passed = nullptr;  // recorded behind its last launch
  };

  // Null: to be launched without a graph.
  Graph* FindOrCapture(const CudaGraphKey& key, cudaStream_t stream,
                       absl::FunctionRef<absl::Status(cudaStream_t)> launch);
  bool WasSeen(const CudaGraphKey& key);
  absl::Status Capture(cudaStream_t stream, absl::FunctionRef<absl::Status(cudaStream_t)> launch,
                       Graph& graph) const;
  void TakeError(const absl::Status& error);
  void DestroyPassed();
  static void Destroy(Graph& graph);

  const int32_t device_index_;
  const std::shared_ptr<CudaGraphErrors> errors_;
  mutable std::mutex mutex_;       // of everything below, held while a graph is made or launched
  std::list<Graph> graphs_;        // the last used one first
  std::list<Graph> retired_;       // the device may not have passed them yet
  std::deque<CudaGraphKey> seen_;  // once
  bool captures_ = true;
  int64_t pause_ = 0;  // launches without a graph until it captures again
};

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_GRAPH_CACHE_H_
