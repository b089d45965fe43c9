#include "server/planning/shard_pieces.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/planning/slot_counter.h"

namespace expertmesh {
namespace {

// Token indices are int32 and GatherRows counts source and received rows in one index.
constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max() / 2;

absl::StatusOr<int64_t> CountTokens(absl::Span<const RoutingSegment> segments) {
  int64_t num_tokens = 0;
  for (const RoutingSegment& segment : segments) {
    if (segment.num_tokens < 0 || segment.num_tokens > kMaxTokens - num_tokens) {
      return absl::InvalidArgumentError(absl::StrCat("num_tokens: ", segment.num_tokens, " after ",
                                                     num_tokens, " others is outside [0, ",
                                                     kMaxTokens, "]"));
    }
    if (segment.topk < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("topk: ", segment.topk, " must be at least 0"));
    }
    if (segment.num_tokens > 0 && segment.topk > 0 &&
        (segment.topk_ids == nullptr || segment.topk_weights == nullptr)) {
      return absl::InvalidArgumentError("topk_ids and topk_weights are missing");
    }
    num_tokens += segment.num_tokens;
  }
  return num_tokens;
}

std::vector<int64_t> EvenShards(int64_t num_tokens, int32_t ep_size) {
  std::vector<int64_t> offsets(ep_size + 1, 0);
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    offsets[rank + 1] = offsets[rank] + num_tokens / ep_size + (rank < num_tokens % ep_size);
  }
  return offsets;
}

absl::StatusOr<std::vector<int64_t>> GivenShards(absl::Span<const int64_t> sizes,
                                                 int64_t num_tokens, int32_t ep_size) {
  if (static_cast<int64_t>(sizes.size()) != ep_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard_sizes: ", sizes.size(), " entries for ", ep_size, " ranks"));
  }
  std::vector<int64_t> offsets(ep_size + 1, 0);
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    const int64_t left = num_tokens - offsets[rank];
    if (sizes[rank] < 0 || sizes[rank] > left) {
      return absl::InvalidArgumentError(
          absl::StrCat("shard_sizes[", rank, "]: ", sizes[rank], " is outside [0, ", left, "]"));
    }
    offsets[rank + 1] = offsets[rank] + sizes[rank];
  }
  if (offsets.back() != num_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard_sizes: add up to ", offsets.back(), ", not to ", num_tokens));
  }
  return offsets;
}

absl::StatusOr<std::vector<int64_t>> ShardsWithSlots(const StepPlanParams& params,
                                                     std::vector<int64_t> offsets) {
  if (params.max_num_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_num_tokens: ", params.max_num_tokens, " must be at least 1"));
  }
  const Placement& placement = *params.placement;
  if (!params.shard_sizes.empty()) {
    if (!ShardsFitSlots(params.segments, placement, params.max_num_tokens, offsets)) offsets = {};
  } else {
    offsets =
        CutShardsToSlots(params.segments, placement, params.max_num_tokens, std::move(offsets));
  }
  if (!offsets.empty()) return offsets;
  return absl::InvalidArgumentError(absl::StrCat("max_num_tokens: the step's rows do not fit ",
                                                 params.max_num_tokens,
                                                 " slots for each pair of ranks"));
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> CutShards(const StepPlanParams& params,
                                               DispatchMode strategy) {
  const int32_t ep_size = params.placement->ep_size();
  absl::StatusOr<int64_t> num_tokens = CountTokens(params.segments);
  if (!num_tokens.ok()) return num_tokens.status();
  if (strategy == DispatchMode::kDirect) {
    std::vector<int64_t> offsets(ep_size + 1, *num_tokens);
    offsets[0] = 0;
    return offsets;
  }
  absl::StatusOr<std::vector<int64_t>> offsets =
      params.shard_sizes.empty() ? EvenShards(*num_tokens, ep_size)
                                 : GivenShards(params.shard_sizes, *num_tokens, ep_size);
  if (!offsets.ok() || strategy != DispatchMode::kAllToAllFixedCapacity) return offsets;
  return ShardsWithSlots(params, *std::move(offsets));
}

std::vector<ShardPiece> CutPieces(absl::Span<const RoutingSegment> segments,
                                  absl::Span<const int64_t> shard_offsets) {
  std::vector<ShardPiece> pieces;
  int32_t rank = 0;
  int64_t token = 0;
  for (const RoutingSegment& segment : segments) {
    const int64_t end = token + segment.num_tokens;
    int64_t done = 0;
    while (token < end) {
      while (token == shard_offsets[rank + 1]) ++rank;
      const int64_t count = std::min(end, shard_offsets[rank + 1]) - token;
      pieces.push_back({rank, token - shard_offsets[rank], count, segment.topk,
                        segment.topk_ids + done * segment.topk,
                        segment.topk_weights + done * segment.topk});
      done += count;
      token += count;
    }
  }
  return pieces;
}

}  // namespace expertmesh
