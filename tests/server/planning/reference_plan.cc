#include "tests/server/planning/reference_plan.h"

#include <map>
#include <set>
#include <utility>

namespace expertmesh {
namespace {

struct Choice {
  int32_t expert_id;
  int32_t k;
  float weight;
};
using Token = std::vector<Choice>;

std::vector<Token> ListTokens(const StepPlanParams& params) {
  std::vector<Token> tokens;
  for (const RoutingSegment& segment : params.segments) {
    for (int64_t t = 0; t < segment.num_tokens; ++t) {
      Token token;
      for (int32_t k = 0; k < segment.topk; ++k) {
        const int32_t expert_id = segment.topk_ids[t * segment.topk + k];
        if (expert_id >= 0) {
          token.push_back({expert_id, k, segment.topk_weights[t * segment.topk + k]});
        }
      }
      tokens.push_back(token);
    }
  }
  return tokens;
}

}  // namespace

StepPlan ReferencePlan(const StepPlanParams& params) {
  const Placement& placement = *params.placement;
  const int32_t ep_size = placement.ep_size();
  const bool per_expert = params.header.combine == CombineMode::kPerExpert;
  const bool distinct = !params.header.apply_router_weight_on_input;
  const std::vector<Token> tokens = ListTokens(params);

  StepPlan plan;
  plan.tokens_per_expert.resize(placement.num_experts());
  for (const Token& token : tokens) {
    for (const Choice& choice : token) ++plan.tokens_per_expert[choice.expert_id];
  }
  plan.shard_offsets = {0};
  const int64_t num_tokens = static_cast<int64_t>(tokens.size());
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    const int64_t size = params.shard_sizes.empty() ? (num_tokens + ep_size - 1 - rank) / ep_size
                                                    : params.shard_sizes[rank];
    plan.shard_offsets.push_back(plan.shard_offsets.back() + size);
  }

  const auto owned = [&](const Token& token, int32_t owner) {
    Token result;
    for (const Choice& choice : token) {
      if (placement.owner_rank(choice.expert_id) == owner) result.push_back(choice);
    }
    return result;
  };
  // Rows that come back for one token from one owner: kPerExpert alone counts experts.
  const auto num_returned = [&](const Token& pairs) -> int64_t {
    if (pairs.empty()) return 0;
    if (!per_expert) return 1;
    if (!distinct) return static_cast<int64_t>(pairs.size());
    std::set<int32_t> experts;
    for (const Choice& choice : pairs) experts.insert(choice.expert_id);
    return static_cast<int64_t>(experts.size());
  };

  for (int32_t rank = 0; rank < ep_size; ++rank) {
    StepSlice slice;
    slice.header = params.header;
    slice.ep_rank = rank;
    slice.ep_size = ep_size;
    const bool gathers = params.header.strategy == DispatchMode::kAllGatherReduceScatter;
    if (gathers) slice.gather_counts.resize(ep_size);
    const int64_t begin = plan.shard_offsets[rank];
    const int64_t end = plan.shard_offsets[rank + 1];
    slice.num_source_tokens = end - begin;

    // Going out, and the place where each (token, owner) or (token, choice) comes back.
    std::map<std::pair<int64_t, int32_t>, int64_t> partial_row;  // token, owner
    std::map<std::pair<int64_t, int32_t>, int64_t> expert_row;   // token, expert
    std::map<std::pair<int64_t, int32_t>, int64_t> choice_row;   // token, k
    int64_t returned = 0;
    for (int32_t owner = 0; owner < ep_size; ++owner) {
      int64_t num_sent = 0;
      const int64_t first_returned = returned;
      for (int64_t t = begin; t < end; ++t) {
        const Token pairs = owned(tokens[t], owner);
        if (pairs.empty()) continue;
        slice.send_rows.push_back(static_cast<int32_t>(t - begin));
        ++num_sent;
        if (!per_expert) {
          partial_row[{t, owner}] = returned++;
          continue;
        }
        for (const Choice& choice : pairs) {
          if (distinct && expert_row.count({t, choice.expert_id}) > 0) {
            choice_row[{t, choice.k}] = expert_row[{t, choice.expert_id}];
          } else {
            choice_row[{t, choice.k}] = expert_row[{t, choice.expert_id}] = returned++;
          }
        }
      }
      slice.send_counts.push_back(num_sent);
      slice.return_recv_counts.push_back(returned - first_returned);
    }

    slice.sum_offsets = {0};
    for (int64_t t = begin; t < end; ++t) {
      if (per_expert) {
        for (const Choice& choice : tokens[t]) {
          slice.sum_rows.push_back(choice_row.at({t, choice.k}));
          slice.sum_weights.push_back(distinct ? choice.weight : 1.0f);
        }
      } else {
        for (int32_t owner = 0; owner < ep_size; ++owner) {
          const auto row = partial_row.find({t, owner});
          if (row != partial_row.end()) slice.sum_rows.push_back(row->second);
        }
      }
      slice.sum_offsets.push_back(static_cast<int64_t>(slice.sum_rows.size()));
    }

    slice.pair_offsets = {0};
    int32_t gathered = 0;
    for (int32_t source = 0; source < ep_size; ++source) {
      int64_t num_received = 0;
      int64_t num_back = 0;
      for (int64_t t = plan.shard_offsets[source]; t < plan.shard_offsets[source + 1]; ++t) {
        const Token pairs = owned(tokens[t], rank);
        if (gathers && !pairs.empty()) slice.gather_rows.push_back(gathered);
        if (gathers && !tokens[t].empty()) ++slice.gather_counts[source];
        gathered += !tokens[t].empty();
        if (pairs.empty()) continue;
        ++num_received;
        num_back += num_returned(pairs);
        for (const Choice& choice : pairs) {
          slice.pair_local_expert.push_back(placement.local_expert_id(choice.expert_id));
          slice.pair_k.push_back(choice.k);
          slice.pair_weights.push_back(choice.weight);
        }
        slice.pair_offsets.push_back(static_cast<int64_t>(slice.pair_k.size()));
      }
      slice.recv_counts.push_back(num_received);
      slice.return_send_counts.push_back(num_back);
    }
    plan.slices.push_back(slice);
  }
  return plan;
}

}  // namespace expertmesh
