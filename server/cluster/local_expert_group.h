#ifndef EXPERTMESH_SERVER_CLUSTER_LOCAL_EXPERT_GROUP_H_
#define EXPERTMESH_SERVER_CLUSTER_LOCAL_EXPERT_GROUP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/buffer.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/expert_kernels.h"
#include "server/cluster/direct_step.h"
#include "server/cluster/expert_group.h"
#include "server/cluster/group_usage.h"
#include "server/cluster/rank_client.h"
#include "server/model/placement.h"
#include "server/model/weight_source.h"
#include "server/rank/rank_engine.h"

namespace expertmesh {

// A rank is a thread or more: a bound far above use, far below what machines give.
inline constexpr int32_t kMaxLocalRanks = 1024;

struct LocalExpertGroupOptions {
  int32_t num_ranks = 1;
  std::optional<CpuIsa> isa;  // default: the best that this machine has
  // Threads of all ranks together; 0: one per core. Each rank gets num_threads / num_ranks, at
  // least one.
  int num_threads = 0;
  // The GPU that all ranks compute on instead of the CPU; its pinned memory is their host memory.
  std::shared_ptr<CudaDevice> device;
  // The device was found lost (CudaDevice::status) after a step had failed: no later one can do
  // better. Called on the thread that runs the step. Null: nobody asks.
  std::function<void(const absl::Status&)> on_device_lost;
  std::shared_ptr<Allocator> allocator;  // host memory; default: a HostBufferPool of its own
  ActivationFormat format = ActivationFormat::kContiguous;
  // Default: Placement::Contiguous.
  std::function<absl::StatusOr<Placement>(const ModelSpec& model, const LayerSpec& layer,
                                          int32_t ep_size)>
      place;
};

struct LoadProgress {
  int64_t loaded_bytes = 0;
  int64_t total_bytes = 0;
};

// The embedded default: all ranks of the group inside this process.
class LocalExpertGroup : public ExpertGroup {
 public:
  // INVALID_ARGUMENT for num_ranks not in [1, kMaxLocalRanks]; FAILED_PRECONDITION when this
  // machine lacks the instruction set; RESOURCE_EXHAUSTED when it gives no more threads.
  static absl::StatusOr<std::unique_ptr<LocalExpertGroup>> Create(
      const LocalExpertGroupOptions& options);
  ~LocalExpertGroup() override;

  // Packed bytes of these models' experts on each rank, [ep_size].
  absl::StatusOr<std::vector<int64_t>> NeedBytes(absl::Span<const WeightSource* const> sources);

  // What there is for them, on the host or on the device.
  absl::StatusOr<int64_t> AvailableBytes() const;

  // Loads every layer of every model, all ranks side by side, then forms epoch 1. Once; blocking.
  // RESOURCE_EXHAUSTED, before anything is read, when `available_bytes` (default:
  // AvailableBytes()) is less than the need; on a device, less than what the buffers take with
  // DeviceReserveBytes. `progress` is called by one thread at a time.
  // The sources are not needed afterwards.
  absl::Status Load(absl::Span<const WeightSource* const> sources,
                    const std::function<void(const LoadProgress&)>& progress = nullptr,
                    std::optional<int64_t> available_bytes = std::nullopt);

  int32_t ep_size() const override { return static_cast<int32_t>(engines_.size()); }
  uint64_t incarnation() const override { return incarnation_; }
  uint64_t epoch() const override { return epoch_.load(std::memory_order_acquire); }
  // To be asked once there is an epoch.
  const Placement* placement(std::string_view model, int32_t layer) const override;
  Allocator* request_allocator() override { return options_.allocator.get(); }

  // As ExpertGroup. A step that fails takes its epoch with it: the next one has formed when this
  // returns. A plan of another epoch is UNAVAILABLE and harms nothing.
  absl::StatusOr<GroupStepResult> RunStep(GroupStep step, bool on_caller,
                                          absl::Time step_deadline) override;

  const GroupUsage& usage() const { return usage_; }
  // [ep_size]; to be asked once there is an epoch.
  const std::vector<int64_t>& weight_bytes() const { return weight_bytes_; }

  std::string instruction_set() const override;
  // To be asked once there is an epoch.
  DType weight_dtype(std::string_view model) const override;
  std::string device_name() const { return engines_.front()->backend().device_name(); }
  int threads_per_rank() const { return threads_per_rank_; }

 private:
  explicit LocalExpertGroup(LocalExpertGroupOptions options);

  absl::Status CreateRanks();
  // Of `layer_bytes`, [ep_size]. Places the layers first.
  absl::StatusOr<std::vector<int64_t>> SumLayers(
      absl::Span<const WeightSource* const> sources,
      absl::FunctionRef<absl::StatusOr<int64_t>(const ModelSpec&, const LayerSpec&,
                                                const Placement&, int32_t rank)>
          layer_bytes);
  absl::Status CheckMemory(absl::Span<const WeightSource* const> sources, int64_t available_bytes);
  absl::Status PlaceLayers(absl::Span<const WeightSource* const> sources);
  void FormEpoch();
  absl::StatusOr<GroupStepResult> RunOnRanks(GroupStep step, bool on_caller, absl::Time deadline);
  absl::StatusOr<GroupStepResult> RunDirect(GroupStep step, bool on_caller, absl::Time deadline);
  absl::StatusOr<GroupStepResult> RunOnCaller(GroupStep step, absl::Time deadline);
  absl::StatusOr<GroupStepResult> RunOnRankThreads(GroupStep step, absl::Time deadline);

  LocalExpertGroupOptions options_;
  CpuIsa isa_ = CpuIsa::kPortable;
  int threads_per_rank_ = 1;
  uint64_t incarnation_ = 0;
  std::atomic<uint64_t> epoch_{0};
  std::map<std::string, std::map<int32_t, Placement>, std::less<>> placements_;
  std::map<std::string, int64_t, std::less<>> hidden_sizes_;
  std::map<std::string, DType, std::less<>> weight_dtypes_;
  std::unique_ptr<DirectStep> direct_;
  std::vector<std::unique_ptr<RankEngine>> engines_;
  std::vector<std::unique_ptr<RankClient>> clients_;
  GroupUsage usage_;
  std::vector<int64_t> weight_bytes_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_LOCAL_EXPERT_GROUP_H_
