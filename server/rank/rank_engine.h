#ifndef EXPERTMESH_SERVER_RANK_RANK_ENGINE_H_
#define EXPERTMESH_SERVER_RANK_RANK_ENGINE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/step_arena.h"
#include "kernels/expert_kernels.h"
#include "server/comm/communicator.h"
#include "server/model/placement.h"
#include "server/model/weight_source.h"
#include "server/planning/step_plan.h"
#include "server/rank/compute_turns.h"
#include "server/rank/rank_backend.h"
#include "server/rank/shared_experts.h"
#include "server/rank/token_shard.h"
#include "server/routing/router.h"

namespace expertmesh {

struct RankEngineOptions {
  int32_t ep_rank = 0;
  int32_t ep_size = 1;
  std::unique_ptr<RankBackend> backend;
  ActivationFormat format = ActivationFormat::kContiguous;  // of the rows given to the kernels
};

// What a rank's communicator moved, by peer.
struct RankTraffic {
  std::vector<int64_t> bytes_sent;  // [ep_size], or empty: nothing
  std::vector<int64_t> wait_nanos;  // the same
};

struct RankStepResult {
  ShardOutput output;
  StepTimings timings;
  int64_t num_expert_rows = 0;  // that its experts computed
  // Since the last step of the epoch that ended well: with steps side by side, maybe another's.
  RankTraffic traffic;
  // Not OK: the step ran to its end, and somebody on the output's way had no room for it: the
  // output is empty, the step failed, its communicator stands.
  absl::Status output_error;
};

class RankStep;

// How many steps may overlap on a rank, whatever the control plane's --lanes.
inline constexpr int32_t kMaxLanes = 4;

// One rank: its experts' and the shared experts' packed weights, and its part of a step. It does
// not know where its slice and its shard came from. All functions by one thread at a time, except
// Abort, and steps that overlap.
//
// Lanes: while one step's rows are on the wire another one's experts compute. Each step has a
// thread of its own from Begin to its end; what orders the steps among each other is
//   - the communicator, which runs collectives by the places that the control plane gave them
//     (StepHeader::dispatch_order, combine_order): the same order on all ranks, whatever they take;
//   - the turn (TakeTurn), by which they compute one after the other, in the order in which their
//     slices came. That is the order of their dispatches, so a step that waits for its rows with
//     the turn in hand keeps nobody waiting who could compute.
// A step's dispatch has a lower place than its combine, and it waits for nothing else; so the
// lowest place that is not done always gets done: nobody waits in a circle.
class RankEngine {
 public:
  explicit RankEngine(RankEngineOptions options);
  ~RankEngine();

  int32_t ep_rank() const { return options_.ep_rank; }
  int32_t ep_size() const { return options_.ep_size; }
  RankBackend& backend() { return *options_.backend; }

  // Packs this rank's experts of one layer, and its shared experts where it has some. Blocking, on
  // the rank's threads. `progress` gets the bytes of each expert as it was read; from any of these
  // threads, several at once. Nothing is kept when it fails. ALREADY_EXISTS for a layer that is
  // held; otherwise errors of `source` and of the kernels.
  absl::Status LoadLayer(const WeightSource& source, const LayerSpec& layer,
                         const Placement& placement,
                         absl::FunctionRef<void(int64_t num_bytes)> progress);
  // Packed bytes of all layers.
  int64_t weight_bytes() const;

  // Enters an epoch with its communicator (null where ep_size is 1 and none is wanted). No step may
  // be in progress. Gives back the communicator of before: to end it may take a while, which nobody
  // should do with a lock in hand.
  std::unique_ptr<Communicator> EnterEpoch(uint64_t incarnation, uint64_t epoch,
                                           std::unique_ptr<Communicator> communicator);

  // Aborts the epoch's communicator, if there is one: steps in progress on all its ranks end.
  // Any thread, but not during EnterEpoch.
  void Abort(const absl::Status& reason);
  // The same without waiting, as Communicator::Break.
  void Break(const absl::Status& reason);

  // No operation has this place: the step that was to have it does not come. Of another epoch:
  // nothing happens.
  void SkipOrder(uint64_t incarnation, uint64_t epoch, int64_t order);

  // A step's place among those that overlap; steps that do not need none. In the order in which the
  // slices came.
  ComputeTurns::Turn TakeTurn() { return turns_.Take(); }

  // First phase of a step: see RankStep. A slice of another epoch is refused with UNAVAILABLE and
  // nothing happens. After any other error the communicator is aborted, because the peers count on
  // this rank: INVALID_ARGUMENT for a slice or shard that is inconsistent or does not fit what the
  // rank holds, NOT_FOUND for a model or layer that it does not hold, RESOURCE_EXHAUSTED.
  absl::StatusOr<std::unique_ptr<RankStep>> Begin(StepSlice slice, TokenShard shard);

  // All phases. Blocking; every other rank must run the step on another thread. Steps that overlap
  // have places in their headers and a turn each.
  absl::StatusOr<RankStepResult> RunStep(StepSlice slice, TokenShard shard, absl::Time deadline,
                                         ComputeTurns::Turn turn = {});

 private:
  friend class RankStep;
  struct Layer {
    int32_t num_local_experts = 0;
    int64_t hidden_size = 0;
    std::unique_ptr<ExpertKernels> kernels;  // null when the rank holds none of the experts
    std::unique_ptr<SharedExperts> shared;   // null when the layer has none
    // For steps that ranks route themselves: the rule, with its correction bias but not the gate.
    std::unique_ptr<Router> router;
    std::optional<Placement> placement;
  };

  RankTraffic TakeTraffic();
  const Layer* FindLayer(const std::string& model, int32_t layer) const;

  const RankEngineOptions options_;
  StepArenaPool device_arenas_;
  StepArenaPool expert_arenas_;
  StepArenaPool host_arenas_;
  std::map<std::string, std::map<int32_t, Layer>> models_;
  ComputeTurns turns_;
  uint64_t incarnation_ = 0;
  uint64_t epoch_ = 0;
  std::unique_ptr<Communicator> communicator_;
  std::mutex traffic_mutex_;
  RankTraffic taken_;  // of this epoch, so far
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RANK_RANK_ENGINE_H_
