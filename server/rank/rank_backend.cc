#include "server/rank/rank_backend.h"

#include <algorithm>
#include <thread>

#include "kernels/base/host_buffer_pool.h"

namespace expertmesh {
namespace {

// How long an idle thread of a rank may spin where cores are left over.
constexpr int64_t kSpinMicros = 50;
// Cores that gRPC's poller and the clients' side of a machine need for themselves.
constexpr int kSpareCores = 2;

int NumCores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

}  // namespace

int ThreadsPerRank(const RankHardware& hardware) {
  const int num_threads = hardware.num_threads > 0 ? hardware.num_threads : NumCores();
  return std::max(1, num_threads / hardware.num_ranks);
}

absl::StatusOr<std::unique_ptr<RankBackend>> NewRankBackend(const RankHardware& hardware) {
  ParallelForOptions threads;
  threads.num_threads = ThreadsPerRank(hardware);
  // On a GPU they pack weights; then they have nothing to do.
  if (hardware.device != nullptr) return NewCudaRankBackend(hardware.device, threads);
  const int num_left = NumCores() - threads.num_threads * hardware.num_ranks;
  threads.spin_micros = num_left >= kSpareCores ? kSpinMicros : 0;
  CpuRankBackendOptions options;
  options.isa = hardware.isa.value_or(SupportedCpuIsas().back());
  options.threads = threads;
  options.allocator =
      hardware.allocator != nullptr ? hardware.allocator : std::make_shared<HostBufferPool>();
  return NewCpuRankBackend(options);
}

}  // namespace expertmesh
