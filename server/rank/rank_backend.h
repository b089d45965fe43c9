#ifndef EXPERTMESH_SERVER_RANK_RANK_BACKEND_H_
#define EXPERTMESH_SERVER_RANK_RANK_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/buffer.h"
#include "kernels/base/parallel_for.h"
#include "kernels/base/stream.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/expert_kernels.h"
#include "kernels/row_ops.h"

namespace expertmesh {

// The device that one rank computes on: where its rows live and who works on them. One step at a
// time.
class RankBackend {
 public:
  virtual ~RankBackend() = default;

  virtual const char* instruction_set() const = 0;
  // "cpu", "cuda:0"
  virtual std::string device_name() const { return "cpu"; }
  // Memory of the device that is free; nullopt: it is the host's.
  virtual std::optional<int64_t> device_free_bytes() const { return std::nullopt; }
  // Of the memory for weights, for one buffer of this size.
  virtual int64_t TakenBytes(int64_t size_bytes) const { return size_bytes; }
  // As CudaDevice::status; for after a step or an epoch has failed.
  virtual absl::Status device_status() const { return absl::OkStatus(); }
  // How bytes get from one rank's memory to another's within a process (InProcessCommunicator);
  // null: memcpy.
  virtual std::function<absl::Status(std::byte* to, const std::byte* from, int64_t size_bytes)>
  copy_bytes() {
    return nullptr;
  }
  // Memory for rows on the device, and host memory for indices and outputs; the same where the
  // device is the host. Shared, because outputs outlive steps and may outlive the rank.
  virtual const std::shared_ptr<Allocator>& device_allocator() const = 0;
  virtual const std::shared_ptr<Allocator>& host_allocator() const = 0;
  // Work on several streams of one rank may overlap.
  virtual std::unique_ptr<Stream> NewStream() = 0;
  virtual RowOps& row_ops() = 0;
  // Errors as NewCpuExpertKernels.
  virtual absl::StatusOr<std::unique_ptr<ExpertKernels>> NewExpertKernels(
      const ExpertLayerShape& shape) = 0;
  // Calls load(i) once for every i in [0, n), on as many threads as the rank has. Blocking.
  virtual void ForEachLoad(int64_t n, absl::FunctionRef<void(int64_t)> load) = 0;
};

struct CpuRankBackendOptions {
  CpuIsa isa = CpuIsa::kPortable;
  ParallelForOptions threads;
  std::shared_ptr<Allocator> allocator;  // host memory
};

// Streams are inline: the thread that runs a step is the rank's thread. FAILED_PRECONDITION when
// this machine lacks the instruction set.
absl::StatusOr<std::unique_ptr<RankBackend>> NewCpuRankBackend(
    const CpuRankBackendOptions& options);

// A GPU, which ranks of one process may share. Streams run apart from the thread that runs a step;
// host memory is pinned. `threads` pack weights.
std::unique_ptr<RankBackend> NewCudaRankBackend(std::shared_ptr<CudaDevice> device,
                                                const ParallelForOptions& threads);

// What the ranks of this process compute with.
struct RankHardware {
  std::shared_ptr<CudaDevice> device;  // of all of them; null: the CPU
  std::optional<CpuIsa> isa;           // of the CPU; default: the best that this machine has
  int num_threads = 0;                 // of all of them together; 0: one for each core
  int32_t num_ranks = 1;
  std::shared_ptr<Allocator> allocator;  // of the CPU; null: a HostBufferPool of the rank's own
};

// At least one.
int ThreadsPerRank(const RankHardware& hardware);

// For one of the ranks. Errors as above.
absl::StatusOr<std::unique_ptr<RankBackend>> NewRankBackend(const RankHardware& hardware);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RANK_RANK_BACKEND_H_
