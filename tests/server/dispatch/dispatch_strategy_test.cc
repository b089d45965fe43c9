#include "server/dispatch/dispatch_strategy.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "kernels/cpu/cpu_kernels.h"
#include "server/comm/in_process_communicator.h"
#include "tests/server/planning/random_routing.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;

TEST(FindDispatchStrategyTest, KnowsItsModes) {
  for (const DispatchMode mode : {DispatchMode::kPassthrough, DispatchMode::kAllToAll,
                                  DispatchMode::kAllGatherReduceScatter, DispatchMode::kDirect}) {
    EXPECT_EQ((*FindDispatchStrategy(mode))->mode(), mode);
  }
  for (const DispatchMode mode : {DispatchMode::kAuto, static_cast<DispatchMode>(77)}) {
    EXPECT_EQ(FindDispatchStrategy(mode).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

// All ranks of a group, driven in turn by this thread, with an "FFN" that multiplies a row by
// (global expert id + 1).
class Ranks {
 public:
  Ranks(const StepPlan& plan, const Placement& placement, int64_t hidden_size,
        const std::vector<float>& hidden)
      : plan_(plan), placement_(placement), hidden_size_(hidden_size), hidden_(hidden) {
    communicators_ = NewInProcessCommunicators(placement.ep_size());
  }

  const Communicator& communicator(int32_t rank) const { return *communicators_[rank]; }

  // Output rows of all tokens, float32.
  std::vector<float> Run(DispatchMode mode) {
    const DispatchStrategy& strategy = **FindDispatchStrategy(mode);
    struct Rank {
      std::unique_ptr<Stream> stream;
      std::unique_ptr<StepArena> arena;
      std::vector<RowSpan> shard;
      std::vector<std::byte> output;
      std::unique_ptr<DispatchHandle> handle;
    };
    std::vector<Rank> ranks(placement_.ep_size());
    for (int32_t r = 0; r < placement_.ep_size(); ++r) {
      Rank& rank = ranks[r];
      rank.stream = NewInlineHostStream();
      rank.arena = std::make_unique<StepArena>(&memory_);
      const int64_t first = plan_.shard_offsets[r];
      rank.shard = {{reinterpret_cast<const std::byte*>(hidden_.data() + first * hidden_size_),
                     plan_.shard_offsets[r + 1] - first}};
      DispatchContext context;
      context.hidden_size = hidden_size_;
      context.num_local_experts = static_cast<int32_t>(placement_.local_experts(r).size());
      context.row_ops = row_ops_.get();
      context.stream = rank.stream.get();
      context.communicator = communicators_[r].get();
      context.arena = context.host_arena = rank.arena.get();
      rank.handle = *strategy.Dispatch(plan_.slices[r], rank.shard, context);
    }
    for (int32_t r = 0; r < placement_.ep_size(); ++r) {
      const ExpertRows rows = *ranks[r].handle->Permute();
      float* const output = reinterpret_cast<float*>(
          *ranks[r].arena->Allocate(rows.num_rows * hidden_size_ * int64_t{sizeof(float)}));
      EXPECT_TRUE(ranks[r]
                      .stream
                      ->Enqueue([this, r, rows, output] {
                        const auto* input = reinterpret_cast<const float*>(rows.rows);
                        const absl::Span<const int32_t> experts = placement_.local_experts(r);
                        for (size_t e = 0; e < experts.size(); ++e) {
                          for (int64_t i = rows.expert_offsets[e] * hidden_size_;
                               i < rows.expert_offsets[e + 1] * hidden_size_; ++i) {
                            output[i] = input[i] * static_cast<float>(experts[e] + 1);
                          }
                        }
                        return absl::OkStatus();
                      })
                      .ok());
      EXPECT_TRUE(ranks[r].handle->Combine(output).ok());
    }
    std::vector<float> outputs;
    for (int32_t r = 0; r < placement_.ep_size(); ++r) {
      Rank& rank = ranks[r];
      const DType dtype = plan_.slices[r].header.output_dtype;
      const int64_t count = plan_.slices[r].num_source_tokens * hidden_size_;
      rank.output.resize(count * DTypeBytes(dtype));
      EXPECT_TRUE(rank.handle->Finish(SourceAddend{}, rank.output.data()).ok());
      const absl::Status status = rank.stream->Wait(absl::Now() + absl::Seconds(60));
      EXPECT_TRUE(status.ok()) << status;
      for (int64_t i = 0; i < count; ++i) {
        outputs.push_back(LoadFloat(rank.output.data(), dtype, i));
      }
    }
    return outputs;
  }

 private:
  const StepPlan& plan_;
  const Placement& placement_;
  const int64_t hidden_size_;
  const std::vector<float>& hidden_;
  HostBufferPool memory_{HostBufferPoolOptions{.poison_byte = 0xff}};
  ParallelFor parallel_for_{ParallelForOptions{}};
  std::unique_ptr<RowOps> row_ops_ = *NewCpuRowOps(CpuIsa::kPortable, &parallel_for_);
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

StepHeader MakeHeader(DType activation, DType combine, DType output) {
  StepHeader header;
  header.activation_dtype = activation;
  header.combine_dtype = combine;
  header.output_dtype = output;
  return header;
}

TEST(AllToAllTest, SmallStepByHand) {
  // Experts 0 and 1 on rank 0, 2 and 3 on rank 1; one token each.
  const Placement placement = *Placement::Contiguous(4, 2);
  const std::vector<int32_t> ids = {3, 0, 2, 3, -1, 3};
  const std::vector<float> weights = {0.5f, 2, 1, 0.25f, NAN, 0.5f};
  const RoutingSegment segment{ids.data(), weights.data(), 2, 3};
  StepPlanParams params;
  params.header = MakeHeader(DType::kFloat32, DType::kFloat32, DType::kFloat32);
  params.segments = absl::MakeConstSpan(&segment, 1);
  params.placement = &placement;
  const StepPlan plan = *PlanStep(params);
  const std::vector<float> hidden = {1, 10, 100, 1000};
  Ranks ranks(plan, placement, 2, hidden);
  // 1 * (0.5 * 4 + 2 * 1 + 1 * 3) and 100 * (0.25 * 4 + 0.5 * 4)
  EXPECT_THAT(ranks.Run(DispatchMode::kAllToAll), ElementsAre(7, 70, 300, 3000));
  EXPECT_THAT(ranks.communicator(0).bytes_sent(), ElementsAre(0, 8));  // token 0 to rank 1
  EXPECT_THAT(ranks.communicator(1).bytes_sent(), ElementsAre(8, 0));  // its partial back
}

// A row crosses once per (token, owner) that is not its source, however many of the owner's experts
// it needs, and what comes back is one partial each, or one row per expert. Gathered, each row with
// an expert goes once to everyone; what comes back is the same.
class BytesOnTheWireTest : public ::testing::TestWithParam<DispatchMode> {};

TEST_P(BytesOnTheWireTest, NothingCrossesTwice) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto ep_size = static_cast<int32_t>(1 + random() % 6);
    const RandomRouting routing = MakeRandomRouting(random, 30, 6, 12);
    const RoutingSegment segment = routing.Segment(0, 30);
    const Placement placement = MakeRandomPlacement(random, 12, ep_size);
    const std::vector<int64_t> shard_sizes = MakeRandomShardSizes(random, 30, ep_size);
    std::vector<float> hidden(30 * 5);
    for (float& value : hidden) value = static_cast<float>(random() % 64);
    for (const CombineMode combine : {CombineMode::kSum, CombineMode::kPerExpert}) {
      StepPlanParams params;
      params.header = MakeHeader(DType::kFloat32, DType::kFloat16, DType::kFloat32);
      params.header.strategy = GetParam();
      params.header.combine = combine;
      params.segments = absl::MakeConstSpan(&segment, 1);
      params.placement = &placement;
      params.shard_sizes = shard_sizes;
      const StepPlan plan = *PlanStep(params);
      Ranks ranks(plan, placement, 5, hidden);
      const std::vector<float> outputs = ranks.Run(GetParam());
      params.header.strategy = DispatchMode::kAllToAll;
      const StepPlan exact = *PlanStep(params);
      EXPECT_EQ(outputs, Ranks(exact, placement, 5, hidden).Run(DispatchMode::kAllToAll));

      std::vector<std::vector<int64_t>> expected(ep_size, std::vector<int64_t>(ep_size));
      for (int32_t source = 0; source < ep_size; ++source) {
        for (int64_t t = plan.shard_offsets[source]; t < plan.shard_offsets[source + 1]; ++t) {
          std::vector<std::set<int32_t>> experts(ep_size);
          for (int32_t k = 0; k < 6; ++k) {
            const int32_t id = routing.topk_ids[t * 6 + k];
            if (id >= 0) experts[placement.owner_rank(id)].insert(id);
          }
          for (int32_t owner = 0; owner < ep_size; ++owner) {
            const bool is_gathered = GetParam() == DispatchMode::kAllGatherReduceScatter &&
                                     std::any_of(experts.begin(), experts.end(),
                                                 [](const auto& ids) { return !ids.empty(); });
            if (owner != source && is_gathered) expected[source][owner] += 5 * 4;
            if (owner == source || experts[owner].empty()) continue;
            const auto back =
                static_cast<int64_t>(combine == CombineMode::kSum ? 1 : experts[owner].size());
            if (!is_gathered) expected[source][owner] += 5 * 4;
            expected[owner][source] += back * 5 * 2;
          }
        }
      }
      for (int32_t rank = 0; rank < ep_size; ++rank) {
        EXPECT_THAT(ranks.communicator(rank).bytes_sent(),
                    ::testing::ElementsAreArray(expected[rank]));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, BytesOnTheWireTest,
                         ::testing::Values(DispatchMode::kAllToAll,
                                           DispatchMode::kAllGatherReduceScatter),
                         [](const auto& test) { return DispatchModeName(test.param); });

// A partial that underflows to -0 is the same 0 in the sum wherever it was made.
TEST(CombineTest, SignOfZeroDoesNotDependOnThePlacement) {
  const std::vector<int32_t> ids = {0, 1};
  const std::vector<float> weights = {-1e-20f, -1e-20f};
  const RoutingSegment segment{ids.data(), weights.data(), 1, 2};
  const std::vector<float> hidden = {1, 1, 1};
  for (const std::vector<int32_t>& owners : {std::vector<int32_t>{0, 0}, {1, 1}, {0, 1}}) {
    const Placement placement = *Placement::FromOwners(owners, 2);
    StepPlanParams params;
    params.header = MakeHeader(DType::kFloat32, DType::kFloat16, DType::kFloat16);
    params.segments = absl::MakeConstSpan(&segment, 1);
    params.placement = &placement;
    const StepPlan plan = *PlanStep(params);
    Ranks ranks(plan, placement, 3, hidden);
    for (const float value : ranks.Run(DispatchMode::kAllToAll)) {
      EXPECT_EQ(value, 0.0f);
      EXPECT_FALSE(std::signbit(value));
    }
  }
}

TEST(DispatchErrorsTest, WhatAStrategyNeeds) {
  StepSlice slice;
  slice.ep_rank = 0;
  slice.ep_size = 2;
  DispatchContext context;
  const auto dispatch = [&](DispatchMode mode) {
    return (*FindDispatchStrategy(mode))->Dispatch(slice, {}, context).status().code();
  };
  EXPECT_EQ(dispatch(DispatchMode::kPassthrough), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(dispatch(DispatchMode::kAllToAll), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(dispatch(DispatchMode::kAllGatherReduceScatter), absl::StatusCode::kFailedPrecondition);
  const auto communicators = NewInProcessCommunicators(3);
  context.communicator = communicators[0].get();
  EXPECT_EQ(dispatch(DispatchMode::kAllToAll), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(dispatch(DispatchMode::kAllGatherReduceScatter), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace expertmesh
