#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/planning/choose_strategy.h"
#include "server/planning/direct_plan.h"
#include "server/planning/owner_set.h"
#include "server/planning/shard_pieces.h"
#include "server/planning/slot_counter.h"
#include "server/planning/step_plan.h"

namespace expertmesh {
namespace {

struct ExpertHome {
  int32_t owner_rank = 0;
  int32_t local_expert_id = 0;
};

// Tells whether an expert appeared before in the same token, and where its row comes back.
class SeenExperts {
 public:
  explicit SeenExperts(int32_t num_experts) : entries_(num_experts) {}

  void NextToken() { ++token_; }
  // Null the first time that `expert_id` is asked for within a token; then the place where its row
  // was noted.
  int64_t* Find(int32_t expert_id) {
    Entry& entry = entries_[expert_id];
    if (entry.token == token_) return &entry.row;
    entry.token = token_;
    return nullptr;
  }
  void Note(int32_t expert_id, int64_t row) { entries_[expert_id].row = row; }

 private:
  struct Entry {
    int64_t token = 0;
    int64_t row = 0;
  };
  std::vector<Entry> entries_;
  int64_t token_ = 0;
};

class Planner {
 public:
  Planner(const StepPlanParams& params, DispatchMode strategy)
      : params_(params),
        ep_size_(params.placement->ep_size()),
        num_experts_(params.placement->num_experts()),
        per_expert_(params.header.combine == CombineMode::kPerExpert),
        distinct_(!params.header.apply_router_weight_on_input),
        strategy_(strategy),
        gather_(strategy == DispatchMode::kAllGatherReduceScatter ||
                strategy == DispatchMode::kAllGatherReduceScatterMonolithic) {
    plan_.slices.resize(ep_size_);
    for (StepSlice& slice : plan_.slices) {
      slice.header = params.header;
      slice.header.strategy = strategy;
      slice.ep_rank = static_cast<int32_t>(&slice - plan_.slices.data());
      slice.ep_size = ep_size_;
      if (strategy != DispatchMode::kAllToAllFixedCapacity) continue;
      for (const RoutingSegment& segment : params.segments) {
        slice.max_topk = std::max(slice.max_topk, segment.topk);
      }
    }
  }

  absl::Status CutShards();
  absl::Status Count();
  void Allocate();
  void Fill();
  StepPlan TakePlan() { return std::move(plan_); }

 private:
  // Where the next row or pair for one owner goes. One cache line each.
  struct alignas(64) OwnerCursor {
    int32_t* local_expert = nullptr;  // arrays of the owner's slice
    int32_t* k = nullptr;
    float* weight = nullptr;
    int64_t num_pairs = 0;
    int64_t* pair_offset = nullptr;  // end of the row that is being filled
    int32_t* gather_row = nullptr;   // of that row
    int32_t* send_row = nullptr;     // in the current source's slice
    int64_t return_row = 0;          // in the current source's returned buffer
  };

  int64_t& num_rows(int32_t source, int32_t owner) {
    return num_rows_[static_cast<size_t>(source) * ep_size_ + owner];
  }
  int64_t& num_return_rows(int32_t source, int32_t owner) {
    return per_expert_ ? num_expert_rows_[static_cast<size_t>(source) * ep_size_ + owner]
                       : num_rows(source, owner);
  }
  void FillPiece(const ShardPiece& piece, absl::Span<OwnerCursor> cursors, OwnerSet& owners,
                 SeenExperts& seen, int64_t& num_sums);

  const StepPlanParams& params_;
  const int32_t ep_size_;
  const int32_t num_experts_;
  const bool per_expert_;
  const bool distinct_;  // an expert that is named twice is computed once
  const DispatchMode strategy_;
  const bool gather_;  // every rank gets every row
  std::vector<ShardPiece> pieces_;
  std::vector<ExpertHome> homes_;         // [num_experts]
  std::vector<int64_t> num_rows_;         // [source, owner]
  std::vector<int64_t> num_expert_rows_;  // [source, owner], kPerExpert
  std::vector<int64_t> num_pairs_;        // [owner]
  std::vector<int64_t> num_sums_;         // [source]
  std::vector<int64_t> num_gathered_;     // [source] tokens with an expert
  int32_t gather_row_ = 0;                // the next such token's
  StepPlan plan_;
};

absl::Status Planner::CutShards() {
  absl::StatusOr<std::vector<int64_t>> offsets = expertmesh::CutShards(params_, strategy_);
  if (!offsets.ok()) return offsets.status();
  pieces_ = CutPieces(params_.segments, *offsets);
  for (StepSlice& slice : plan_.slices) {
    slice.num_source_tokens = (*offsets)[slice.ep_rank + 1] - (*offsets)[slice.ep_rank];
    if (strategy_ == DispatchMode::kAllToAllFixedCapacity) {
      slice.max_num_tokens = SlotBucket(*offsets, params_.max_num_tokens);
    }
  }
  plan_.shard_offsets = *std::move(offsets);
  return absl::OkStatus();
}

absl::Status Planner::Count() {
  const Placement& placement = *params_.placement;
  homes_.resize(num_experts_);
  for (int32_t expert_id = 0; expert_id < num_experts_; ++expert_id) {
    homes_[expert_id] = {placement.owner_rank(expert_id), placement.local_expert_id(expert_id)};
  }
  const size_t num_rank_pairs = static_cast<size_t>(ep_size_) * ep_size_;
  num_rows_.assign(num_rank_pairs, 0);
  if (per_expert_) num_expert_rows_.assign(num_rank_pairs, 0);
  num_pairs_.assign(ep_size_, 0);
  num_sums_.assign(ep_size_, 0);
  num_gathered_.assign(ep_size_, 0);
  plan_.tokens_per_expert.assign(num_experts_, 0);

  OwnerSet owners(ep_size_);
  SeenExperts seen(per_expert_ ? num_experts_ : 0);
  const ExpertHome* const homes = homes_.data();
  int64_t* const tokens_per_expert = plan_.tokens_per_expert.data();
  int64_t* const num_pairs = num_pairs_.data();
  for (const ShardPiece& piece : pieces_) {
    int64_t* const rows = &num_rows(piece.source_rank, 0);
    int64_t* const expert_rows = per_expert_ ? &num_return_rows(piece.source_rank, 0) : nullptr;
    const int32_t* ids = piece.topk_ids;
    int64_t num_token_owners = 0;
    int64_t num_token_pairs = 0;
    int64_t num_gathered = 0;
    for (int64_t token = 0; token < piece.num_tokens; ++token, ids += piece.topk) {
      if (per_expert_) seen.NextToken();
      for (int32_t k = 0; k < piece.topk; ++k) {
        const int32_t expert_id = ids[k];
        if (expert_id == -1) continue;
        if (expert_id < 0 || expert_id >= num_experts_) {
          return absl::InvalidArgumentError(
              absl::StrCat("topk_ids: ", expert_id, " at k ", k, " of token ",
                           plan_.shard_offsets[piece.source_rank] + piece.shard_token + token,
                           " of the step is outside [-1, ", num_experts_, ")"));
        }
        const int32_t owner = homes[expert_id].owner_rank;
        ++tokens_per_expert[expert_id];
        ++num_pairs[owner];
        ++num_token_pairs;
        owners.Insert(owner);
        if (per_expert_ && (!distinct_ || seen.Find(expert_id) == nullptr)) ++expert_rows[owner];
      }
      const int64_t num_owners_before = num_token_owners;
      owners.VisitAscendingAndClear([&](int32_t owner) {
        ++rows[owner];
        ++num_token_owners;
      });
      num_gathered += num_token_owners != num_owners_before;
    }
    num_gathered_[piece.source_rank] += num_gathered;
    num_sums_[piece.source_rank] += per_expert_ ? num_token_pairs : num_token_owners;
  }
  return absl::OkStatus();
}

void Planner::Allocate() {
  for (StepSlice& slice : plan_.slices) {
    const int32_t rank = slice.ep_rank;
    slice.send_counts.resize(ep_size_);
    slice.recv_counts.resize(ep_size_);
    slice.return_send_counts.resize(ep_size_);
    slice.return_recv_counts.resize(ep_size_);
    int64_t num_sent = 0;
    int64_t num_received = 0;
    for (int32_t peer = 0; peer < ep_size_; ++peer) {
      num_sent += slice.send_counts[peer] = num_rows(rank, peer);
      num_received += slice.recv_counts[peer] = num_rows(peer, rank);
      slice.return_send_counts[peer] = num_return_rows(peer, rank);
      slice.return_recv_counts[peer] = num_return_rows(rank, peer);
    }
    slice.send_rows.resize(num_sent);
    slice.pair_offsets.resize(num_received + 1);
    slice.pair_local_expert.resize(num_pairs_[rank]);
    slice.pair_k.resize(num_pairs_[rank]);
    slice.pair_weights.resize(num_pairs_[rank]);
    slice.sum_offsets.resize(slice.num_source_tokens + 1);
    slice.sum_rows.resize(num_sums_[rank]);
    if (per_expert_) slice.sum_weights.resize(num_sums_[rank]);
    if (gather_) {
      slice.gather_counts = num_gathered_;
      slice.gather_rows.resize(num_received);
    }
  }
}

// Source ranks are visited in ascending order and their tokens too, so appending leaves every
// owner's received rows grouped by source rank and every row's pairs in ascending k.
void Planner::Fill() {
  std::vector<OwnerCursor> cursors(ep_size_);
  for (int32_t rank = 0; rank < ep_size_; ++rank) {
    StepSlice& slice = plan_.slices[rank];
    cursors[rank].local_expert = slice.pair_local_expert.data();
    cursors[rank].k = slice.pair_k.data();
    cursors[rank].weight = slice.pair_weights.data();
    cursors[rank].pair_offset = slice.pair_offsets.data() + 1;
    cursors[rank].gather_row = slice.gather_rows.data();
  }
  OwnerSet owners(ep_size_);
  SeenExperts seen(per_expert_ ? num_experts_ : 0);
  int32_t source = -1;
  int64_t num_sums = 0;
  for (const ShardPiece& piece : pieces_) {
    if (piece.source_rank != source) {
      source = piece.source_rank;
      num_sums = 0;
      int64_t send_row = 0;
      int64_t return_row = 0;
      for (int32_t owner = 0; owner < ep_size_; ++owner) {
        cursors[owner].send_row = plan_.slices[source].send_rows.data() + send_row;
        cursors[owner].return_row = return_row;
        send_row += num_rows(source, owner);
        return_row += num_return_rows(source, owner);
      }
    }
    FillPiece(piece, absl::MakeSpan(cursors), owners, seen, num_sums);
  }
}

void Planner::FillPiece(const ShardPiece& piece, absl::Span<OwnerCursor> cursors, OwnerSet& owners,
                        SeenExperts& seen, int64_t& num_sums) {
  StepSlice& slice = plan_.slices[piece.source_rank];
  const ExpertHome* const homes = homes_.data();
  int64_t* const sum_offsets = slice.sum_offsets.data() + piece.shard_token + 1;
  int64_t* const sum_rows = slice.sum_rows.data();
  float* const sum_weights = slice.sum_weights.data();
  const int32_t* ids = piece.topk_ids;
  const float* weights = piece.topk_weights;
  for (int64_t token = 0; token < piece.num_tokens; ++token) {
    if (per_expert_) seen.NextToken();
    for (int32_t k = 0; k < piece.topk; ++k) {
      const int32_t expert_id = ids[k];
      if (expert_id == -1) continue;
      const ExpertHome home = homes[expert_id];
      OwnerCursor& cursor = cursors[home.owner_rank];
      cursor.local_expert[cursor.num_pairs] = home.local_expert_id;
      cursor.k[cursor.num_pairs] = k;
      cursor.weight[cursor.num_pairs] = weights[k];
      ++cursor.num_pairs;
      owners.Insert(home.owner_rank);
      if (per_expert_) {
        const int64_t* const row = distinct_ ? seen.Find(expert_id) : nullptr;
        const int64_t return_row = row != nullptr ? *row : cursor.return_row++;
        if (row == nullptr) seen.Note(expert_id, return_row);
        sum_rows[num_sums] = return_row;
        sum_weights[num_sums] = distinct_ ? weights[k] : 1.0f;
        ++num_sums;
      }
    }
    bool has_owner = false;
    owners.VisitAscendingAndClear([&](int32_t owner) {
      OwnerCursor& cursor = cursors[owner];
      if (gather_) *cursor.gather_row++ = gather_row_;
      has_owner = true;
      *cursor.pair_offset++ = cursor.num_pairs;
      *cursor.send_row++ = static_cast<int32_t>(piece.shard_token + token);
      if (!per_expert_) sum_rows[num_sums++] = cursor.return_row++;
    });
    gather_row_ += has_owner;
    sum_offsets[token] = num_sums;
    ids += piece.topk;
    weights += piece.topk;
  }
}

// So that bad sizes, which are refused later, do not overflow the sum.
constexpr int64_t kMostTokensCounted = int64_t{1} << 32;

StepTraffic Traffic(const StepPlanParams& params) {
  StepTraffic traffic;
  traffic.ep_size = params.placement->ep_size();
  traffic.remote_ranks = params.remote_ranks;
  traffic.include_shared_experts = params.header.include_shared_experts;
  for (const RoutingSegment& segment : params.segments) {
    traffic.num_tokens += std::clamp<int64_t>(segment.num_tokens, 0, kMostTokensCounted);
    traffic.topk = std::max(traffic.topk, segment.topk);
  }
  traffic.bytes_per_row = params.hidden_size * (DTypeBytes(params.header.activation_dtype) +
                                                DTypeBytes(params.header.combine_dtype));
  return traffic;
}

}  // namespace

absl::StatusOr<StepPlan> PlanStep(const StepPlanParams& params) {
  if (params.placement == nullptr) return absl::InvalidArgumentError("placement: missing");
  absl::StatusOr<StrategyChoice> choice = ChooseStrategy(params.header.strategy, Traffic(params));
  if (!choice.ok()) return choice.status();
  Planner planner(params, choice->mode);
  if (absl::Status status = planner.CutShards(); !status.ok()) return status;
  if (absl::Status status = planner.Count(); !status.ok()) return status;
  planner.Allocate();
  planner.Fill();
  StepPlan plan = planner.TakePlan();
  plan.strategy_reason = choice->reason;
  if (choice->mode == DispatchMode::kDirect) MakePlanDirect(plan);
  return plan;
}

}  // namespace expertmesh
