#include "server/planning/slot_counter.h"

#include <algorithm>

namespace expertmesh {

SlotCounter::SlotCounter(const Placement& placement, int64_t max_num_tokens)
    : placement_(placement),
      max_num_tokens_(max_num_tokens),
      used_(placement.ep_size(), 0),
      owners_(placement.ep_size()) {}

bool SlotCounter::Add(const int32_t* topk_ids, int32_t topk) {
  for (int32_t k = 0; k < topk; ++k) {
    if (topk_ids[k] < 0 || topk_ids[k] >= placement_.num_experts()) continue;
    owners_.Insert(placement_.owner_rank(topk_ids[k]));
  }
  token_owners_.clear();
  bool fits = true;
  owners_.VisitAscendingAndClear([&](int32_t owner) {
    token_owners_.push_back(owner);
    fits &= used_[owner] < max_num_tokens_;
  });
  if (!fits) return false;
  for (const int32_t owner : token_owners_) ++used_[owner];
  return true;
}

void SlotCounter::StartNextShard() { std::fill(used_.begin(), used_.end(), 0); }

int64_t SlotBucket(absl::Span<const int64_t> shard_offsets, int64_t max_num_tokens) {
  int64_t most_tokens = 0;
  for (size_t shard = 0; shard + 1 < shard_offsets.size(); ++shard) {
    most_tokens = std::max(most_tokens, shard_offsets[shard + 1] - shard_offsets[shard]);
  }
  int64_t bucket = 1;
  while (bucket < most_tokens && bucket < max_num_tokens) bucket *= 2;
  return std::min(bucket, max_num_tokens);
}

bool ShardsFitSlots(absl::Span<const RoutingSegment> segments, const Placement& placement,
                    int64_t max_num_tokens, absl::Span<const int64_t> shard_offsets) {
  SlotCounter slots(placement, max_num_tokens);
  size_t shard = 0;
  int64_t token = 0;
  for (const RoutingSegment& segment : segments) {
    const int32_t* ids = segment.topk_ids;
    for (int64_t i = 0; i < segment.num_tokens; ++i, ++token, ids += segment.topk) {
      for (; token == shard_offsets[shard + 1]; ++shard) slots.StartNextShard();
      if (!slots.Add(ids, segment.topk)) return false;
    }
  }
  return true;
}

std::vector<int64_t> CutShardsToSlots(absl::Span<const RoutingSegment> segments,
                                      const Placement& placement, int64_t max_num_tokens,
                                      std::vector<int64_t> even_offsets) {
  if (ShardsFitSlots(segments, placement, max_num_tokens, even_offsets)) return even_offsets;
  SlotCounter slots(placement, max_num_tokens);
  std::vector<int64_t> offsets = {0};
  int64_t token = 0;
  for (const RoutingSegment& segment : segments) {
    const int32_t* ids = segment.topk_ids;
    for (int64_t i = 0; i < segment.num_tokens; ++i, ++token, ids += segment.topk) {
      if (slots.Add(ids, segment.topk)) continue;
      offsets.push_back(token);
      if (offsets.size() == even_offsets.size()) return {};
      slots.StartNextShard();
      slots.Add(ids, segment.topk);
    }
  }
  offsets.resize(even_offsets.size(), token);
  return offsets;
}

}  // namespace expertmesh
