#include "server/dispatch/permute.h"

#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "tests/server/planning/random_routing.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class PermuteTest : public ::testing::TestWithParam<std::tuple<ActivationFormat, bool>> {
 protected:
  HostBufferPool memory_;
  StepArena arena_{&memory_};
};

// Which token of the step each row of a rank's gather sources is.
std::vector<int64_t> SourceTokens(const StepPlan& plan, int32_t rank) {
  std::vector<int64_t> tokens;
  for (int64_t token = plan.shard_offsets[rank]; token < plan.shard_offsets[rank + 1]; ++token) {
    tokens.push_back(token);
  }
  for (const StepSlice& source : plan.slices) {
    if (source.ep_rank == rank) continue;
    int64_t sent = 0;
    for (int32_t peer = 0; peer < rank; ++peer) sent += source.send_counts[peer];
    for (int64_t i = 0; i < source.send_counts[rank]; ++i) {
      tokens.push_back(plan.shard_offsets[source.ep_rank] + source.send_rows[sent + i]);
    }
  }
  return tokens;
}

TEST_P(PermuteTest, EveryRowOnceAtItsExpert) {
  const auto [format, weight_on_input] = GetParam();
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto num_experts = static_cast<int32_t>(1 + random() % 20);
    const auto ep_size = static_cast<int32_t>(1 + random() % 5);
    const auto topk = static_cast<int32_t>(1 + random() % 9);
    const RandomRouting routing =
        MakeRandomRouting(random, static_cast<int64_t>(random() % 40), topk, num_experts);
    const RoutingSegment segment = routing.Segment(0, routing.num_tokens());
    const Placement placement = MakeRandomPlacement(random, num_experts, ep_size);
    StepPlanParams params;
    params.header.strategy = DispatchMode::kAllToAll;
    params.header.apply_router_weight_on_input = weight_on_input;
    params.segments = absl::MakeConstSpan(&segment, 1);
    params.placement = &placement;
    const StepPlan plan = *PlanStep(params);

    for (const StepSlice& slice : plan.slices) {
      const absl::Span<const int32_t> experts = placement.local_experts(slice.ep_rank);
      const auto num_local = static_cast<int32_t>(experts.size());
      const Permutation permutation = *PlanPermutation(slice, num_local, format, &arena_);
      ASSERT_EQ(static_cast<int32_t>(permutation.expert_offsets.size()), num_local + 1);
      EXPECT_EQ(permutation.expert_offsets.back(),
                static_cast<int64_t>(permutation.source_rows.size()));
      const std::vector<int64_t> source_tokens = SourceTokens(plan, slice.ep_rank);

      // What each place holds: its expert, its token, and with the weight on the input its weight.
      struct Row {
        int32_t expert_id;
        int64_t token;
        float weight;
      };
      std::map<int64_t, Row> rows;
      std::set<std::pair<int32_t, int64_t>> computed;
      int64_t max_rows = 0;
      for (int32_t local = 0; local < num_local; ++local) {
        const int64_t first = permutation.expert_offsets[local];
        const int64_t last = permutation.expert_offsets[local + 1];
        max_rows = std::max(max_rows, last - first);
        for (int64_t i = first; i < last; ++i) {
          const int64_t place =
              format == ActivationFormat::kContiguous ? i : permutation.destination_rows[i];
          if (format == ActivationFormat::kBatched) {
            EXPECT_EQ(place, local * permutation.max_rows_per_expert + (i - first));
          }
          const int64_t token = source_tokens.at(permutation.source_rows[i]);
          rows[place] = {experts[local], token, weight_on_input ? permutation.weights[i] : 0.0f};
          const bool is_new = computed.insert({experts[local], token}).second;
          EXPECT_TRUE(weight_on_input || is_new) << "computed twice";
        }
        if (format == ActivationFormat::kBatched) {
          EXPECT_EQ(permutation.expert_num_tokens[local], last - first);
        }
      }
      if (format == ActivationFormat::kBatched) {
        EXPECT_EQ(permutation.max_rows_per_expert, max_rows);
        EXPECT_EQ(permutation.num_rows, max_rows * num_local);
      } else {
        EXPECT_EQ(permutation.num_rows, permutation.expert_offsets.back());
      }

      // Every pair of the routing that this rank owns finds its row, in the order of the slice.
      std::set<int64_t> named;
      for (int64_t row = 0; row < slice.num_received_rows(); ++row) {
        for (int64_t pair = slice.pair_offsets[row]; pair < slice.pair_offsets[row + 1]; ++pair) {
          const Row& found = rows.at(permutation.pair_rows[pair]);
          EXPECT_EQ(found.expert_id, experts[slice.pair_local_expert[pair]]);
          EXPECT_EQ(routing.topk_ids[found.token * topk + slice.pair_k[pair]], found.expert_id);
          EXPECT_EQ(routing.topk_weights[found.token * topk + slice.pair_k[pair]],
                    slice.pair_weights[pair]);
          if (weight_on_input) {
            EXPECT_EQ(found.weight, slice.pair_weights[pair]);
            EXPECT_TRUE(named.insert(permutation.pair_rows[pair]).second);
          }
        }
      }
      if (HasFailure()) return;
    }
    arena_.Reset();
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, PermuteTest,
    ::testing::Combine(::testing::Values(ActivationFormat::kContiguous, ActivationFormat::kBatched),
                       ::testing::Bool()),
    [](const auto& test) {
      return std::string(std::get<0>(test.param) == ActivationFormat::kContiguous ? "contiguous"
                                                                                  : "batched") +
             (std::get<1>(test.param) ? "_weight_on_input" : "");
    });

TEST(PermuteSmallTest, ByHand) {
  // Rank 1 of 2 with two experts. Its own tokens 0 and 2 stay, two rows come from rank 0.
  StepSlice slice;
  slice.ep_rank = 1;
  slice.ep_size = 2;
  slice.num_source_tokens = 3;
  slice.send_counts = {1, 2};
  slice.send_rows = {1, 0, 2};
  slice.recv_counts = {2, 2};
  slice.pair_offsets = {0, 1, 4, 5, 6};
  slice.pair_local_expert = {1, 0, 1, 0, 1, 0};
  slice.pair_k = {0, 0, 1, 2, 0, 0};
  slice.pair_weights = {1, 2, 3, 4, 5, 6};
  HostBufferPool memory;
  StepArena arena(&memory);
  const Permutation once = *PlanPermutation(slice, 2, ActivationFormat::kContiguous, &arena);
  EXPECT_THAT(once.expert_offsets, ElementsAre(0, 2, 5));
  EXPECT_THAT(once.source_rows, ElementsAre(4, 2, 3, 4, 0));
  EXPECT_THAT(once.pair_rows, ElementsAre(2, 0, 3, 0, 4, 1));
  EXPECT_THAT(once.weights, IsEmpty());

  slice.header.apply_router_weight_on_input = true;
  const Permutation each = *PlanPermutation(slice, 2, ActivationFormat::kBatched, &arena);
  EXPECT_THAT(each.expert_num_tokens, ElementsAre(3, 3));
  EXPECT_THAT(each.source_rows, ElementsAre(4, 4, 2, 3, 4, 0));
  EXPECT_THAT(each.weights, ElementsAre(2, 4, 6, 1, 3, 5));
  EXPECT_THAT(each.destination_rows, ElementsAre(0, 1, 2, 3, 4, 5));
}

}  // namespace
}  // namespace expertmesh
