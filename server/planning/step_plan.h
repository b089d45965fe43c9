#ifndef EXPERTMESH_SERVER_PLANNING_STEP_PLAN_H_
#define EXPERTMESH_SERVER_PLANNING_STEP_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/dtype.h"
#include "server/model/placement.h"

namespace expertmesh {

enum class DispatchMode : uint8_t {
  kAuto,
  kPassthrough,
  kAllToAll,
  kAllToAllFixedCapacity,
  kAllGatherReduceScatter,
  kAllGatherReduceScatterMonolithic,
  kDirect
};
enum class CombineMode : uint8_t {
  kSum,        // each owner sums its experts' outputs of a token: one partial per
               // (token, owner) goes back
  kPerExpert,  // one row per (token, expert) goes back; bytes do not depend on
               // placement or ep_size
};

const char *DispatchModeName(DispatchMode mode);
const char *CombineModeName(CombineMode mode);

// What all ranks must agree on for a step.
struct StepHeader {
  uint64_t incarnation = 0;
  uint64_t epoch = 0;
  uint64_t step = 0;
  // Places of the step's collectives, before and after its experts, among all of the epoch; the
  // group gives them (CollectiveTag). Both -1: the order of the calls.
  int64_t dispatch_order = -1;
  int64_t combine_order = -1;
  std::string model;
  int32_t layer = 0;                            // the checkpoint's own index
  DispatchMode strategy = DispatchMode::kAuto;  // never kAuto once planned
  CombineMode combine = CombineMode::kSum;
  DType activation_dtype = DType::kInvalid;  // of the rows that are dispatched
  DType combine_dtype = DType::kInvalid;     // of the partials that come back
  DType output_dtype = DType::kInvalid;
  bool apply_router_weight_on_input = false;
  bool include_shared_experts = false;  // each token's source adds them, last
};

// Routing of consecutive tokens of a step: one request, or a piece of one.
// Dense host arrays; ids -1 or in [0, num_experts), checked before. Weights
// beside -1 are never read.
struct RoutingSegment {
  const int32_t *topk_ids = nullptr;    // [num_tokens, topk]
  const float *topk_weights = nullptr;  // [num_tokens, topk]
  int64_t num_tokens = 0;
  int32_t topk = 0;  // 0: tokens without experts, arrays may be null
};

// One rank's part of a step. Token indices are local to the rank's shard.
//
// The shard's tokens are sent once to each rank that owns one of their experts
// (send_*), grouped by destination rank, ascending token within it. The rows
// that arrive, grouped by source rank, come with the work to be done on them
// (pair_*). What goes back lies in the order of the received rows: one partial
// per row (kSum), or one row per distinct expert of each row in order of first
// k (kPerExpert). return_* describe what comes home; sum_* how the source adds
// it up.
struct StepSlice {
  StepHeader header;
  int32_t ep_rank = 0;
  int32_t ep_size = 0;

  int64_t num_source_tokens = 0;
  std::vector<int64_t> send_counts;  // [ep_size] rows
  std::vector<int32_t> send_rows;    // [sum(send_counts)] token index in the shard

  std::vector<int64_t> recv_counts;        // [ep_size] rows
  std::vector<int64_t> pair_offsets;       // [num_received_rows + 1]
  std::vector<int32_t> pair_local_expert;  // [num_pairs] ascending k within a row
  std::vector<int32_t> pair_k;             // [num_pairs]
  std::vector<float> pair_weights;         // [num_pairs]

  std::vector<int64_t> return_send_counts;  // [ep_size] rows that go back to each source
  std::vector<int64_t> return_recv_counts;  // [ep_size] rows that come home from each owner
  std::vector<int64_t> sum_offsets;         // [num_source_tokens + 1]
  // kSum: rows of the returned buffer, ascending owner rank. kPerExpert:
  // ascending k; duplicates name a row twice.
  std::vector<int64_t> sum_rows;   // [sum_offsets.back()]
  std::vector<float> sum_weights;  // kPerExpert: [sum_offsets.back()] (1 when
                                   // the weight went on the input); else empty

  // kAllGatherReduceScatter alone, else empty: every rank gets the rows of all tokens that have an
  // expert, in the step's order, and picks from them what recv_counts would have brought.
  std::vector<int64_t> gather_counts;  // [ep_size] rows that each rank sends to all
  std::vector<int32_t> gather_rows;    // [num_received_rows] index among the gathered rows

  // kAllGatherReduceScatterMonolithic alone, else empty: the router's logits of the shard's tokens,
  // [num_source_tokens, num_experts + num_zero_experts]. Every rank gets all rows with theirs
  // (gather_counts: all tokens), routes and plans by itself; of the arrays above the slice has none
  // but gather_counts.
  std::vector<float> router_logits;

  // kAllToAllFixedCapacity alone, else 0. Each rank sends each other one max_num_tokens rows (the
  // step's bucket of StepPlanParams::max_num_tokens, see SlotBucket), and max_return_rows() back,
  // whatever it needs; what the counts above do not use is never read as data. They and the sizes
  // of the batched format follow from what requests look like, not from their routing.
  int64_t max_num_tokens = 0;
  int32_t max_topk = 0;  // of the step's routing, its widest

  int64_t max_return_rows() const {
    return max_num_tokens * (header.combine == CombineMode::kPerExpert ? max_topk : 1);
  }
  // Of the batched format: every row may be for one expert, and with weights on the input several
  // times.
  int64_t max_rows_per_expert() const {
    return ep_size * max_num_tokens * (header.apply_router_weight_on_input ? max_topk : 1);
  }

  int64_t num_received_rows() const { return static_cast<int64_t>(pair_offsets.size()) - 1; }
  // Rows that the rank gives back, in header.output_dtype. kDirect: the partials of all its rows,
  // with its own end of everything: the shard is the rows that it computes, each sent to itself,
  // sum_* are empty and output_dtype is combine_dtype. Else its source tokens.
  int64_t num_output_rows() const {
    return header.strategy == DispatchMode::kDirect ? return_send_counts[ep_rank]
                                                    : num_source_tokens;
  }
};

// kDirect: what the control plane does itself, the source of every token of the step.
struct DirectSource {
  DType output_dtype = DType::kInvalid;
  // As StepSlice: which tokens' rows go to which rank, what comes back, how it is summed.
  std::vector<int64_t> send_counts;
  std::vector<int32_t> send_rows;
  std::vector<int64_t> return_counts;
  std::vector<int64_t> sum_offsets;
  std::vector<int64_t> sum_rows;
  std::vector<float> sum_weights;
};

// A step's tokens, in the order of the segments, are cut into one contiguous
// shard per rank. kDirect: the first shard holds them all, and the control
// plane makes of it what each rank gets.
struct StepPlan {
  std::vector<int64_t> shard_offsets;      // [ep_size + 1] tokens
  std::vector<StepSlice> slices;           // [ep_size]
  std::vector<int64_t> tokens_per_expert;  // [num_experts] (token, k) pairs, for
                                           // Stats and metrics
  std::optional<DirectSource> direct;      // kDirect alone
  const char *strategy_reason = "";        // why this strategy; lives for ever
};

struct StepPlanParams {
  StepHeader header;
  absl::Span<const RoutingSegment> segments;
  const Placement *placement = nullptr;
  // [ep_size] or empty: tokens per source rank; empty means shards as equal as
  // possible, the first ones larger. kDirect has no use for them.
  absl::Span<const int64_t> shard_sizes;
  // kAllToAllFixedCapacity: rows for each pair of ranks, at most; at least 1. With shard_sizes
  // empty the shards are cut so that they fit, where any cut does.
  int64_t max_num_tokens = 0;
  // For kAuto's choice.
  int64_t hidden_size = 0;
  bool remote_ranks = false;
};

// Pure; the same input gives the same plan. Resolves kAuto. INVALID_ARGUMENT
// for ids outside [-1, num_experts), sizes that do not add up, or a strategy
// that this placement does not allow.
absl::StatusOr<StepPlan> PlanStep(const StepPlanParams &params);

// What one step may hold.
struct StepLimits {
  int64_t max_tokens = 0;
  int64_t max_rank_pairs = 0;  // (token, k) pairs on any one rank
  int64_t max_num_tokens = 0;  // as StepPlanParams, for a step of kAllToAllFixedCapacity; 0: else
};

// How many of the first tokens of `segments` (from `first_token`, counted over all segments) fit
// one step; at least 1 when a token is left. What fits max_num_tokens still fits when some of these
// tokens are left out.
int64_t CountTokensThatFit(absl::Span<const RoutingSegment> segments, const Placement &placement,
                           int64_t first_token, const StepLimits &limits);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_PLANNING_STEP_PLAN_H_
