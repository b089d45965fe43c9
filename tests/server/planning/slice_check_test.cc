#include "server/planning/slice_check.h"

#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/planning/random_routing.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kRank = 1;
constexpr int32_t kRanks = 3;
constexpr int32_t kExperts = 6;

StepSlice GoodSlice(CombineMode combine, DispatchMode strategy = DispatchMode::kAllToAll) {
  std::mt19937_64 random(7);
  const RandomRouting routing = MakeRandomRouting(random, 30, 4, kExperts);
  const RoutingSegment segment = routing.Segment(0, routing.num_tokens());
  const Placement placement = *Placement::Contiguous(kExperts, kRanks);
  StepPlanParams params;
  params.header.strategy = strategy;
  params.header.combine = combine;
  params.header.activation_dtype = DType::kBFloat16;
  params.header.combine_dtype = DType::kBFloat16;
  params.header.output_dtype = DType::kBFloat16;
  params.segments = absl::MakeConstSpan(&segment, 1);
  params.placement = &placement;
  params.max_num_tokens = 20;
  return PlanStep(params)->slices[kRank];
}

absl::Status Check(const StepSlice& slice) {
  return CheckSlice(slice, kRank, kRanks, kExperts / kRanks);
}

TEST(SliceCheckTest, RefusesEachInconsistency) {
  struct Case {
    std::string field;
    std::function<void(StepSlice&)> spoil;
  };
  const int64_t huge = std::numeric_limits<int64_t>::max();
  const std::vector<Case> cases = {
      {"ep_size", [](StepSlice& s) { s.ep_size = 4; }},
      {"ep_rank", [](StepSlice& s) { s.ep_rank = 0; }},
      {"combine", [](StepSlice& s) { s.header.combine = static_cast<CombineMode>(9); }},
      {"activation_dtype", [](StepSlice& s) { s.header.activation_dtype = DType::kInt8; }},
      {"combine_dtype", [](StepSlice& s) { s.header.combine_dtype = DType::kInvalid; }},
      {"output_dtype", [](StepSlice& s) { s.header.output_dtype = DType::kInt64; }},
      {"num_source_tokens", [](StepSlice& s) { s.num_source_tokens = -1; }},
      {"num_source_tokens", [=](StepSlice& s) { s.num_source_tokens = huge; }},
      {"send_counts", [](StepSlice& s) { s.send_counts.pop_back(); }},
      {"send_counts", [](StepSlice& s) { s.send_counts[0] = -1; }},
      {"send_counts", [](StepSlice& s) { ++s.send_counts[kRank]; }},
      {"recv_counts", [=](StepSlice& s) { s.recv_counts[0] = s.recv_counts[2] = huge; }},
      {"send_rows", [](StepSlice& s) { s.send_rows.push_back(0); }},
      {"send_rows", [](StepSlice& s) { s.send_rows[3] = -1; }},
      {"send_rows", [](StepSlice& s) { s.send_rows[3] = 10; }},
      {"pair_offsets", [](StepSlice& s) { s.pair_offsets.clear(); }},
      {"pair_offsets", [](StepSlice& s) { s.pair_offsets[0] = 1; }},
      {"pair_offsets", [](StepSlice& s) { s.pair_offsets[2] = -5; }},
      {"pair_offsets", [=](StepSlice& s) { s.pair_offsets[1] = huge; }},
      {"pair_k", [](StepSlice& s) { s.pair_k.pop_back(); }},
      {"pair_weights", [](StepSlice& s) { s.pair_weights.push_back(1); }},
      {"pair_local_expert", [](StepSlice& s) { s.pair_local_expert[0] = 2; }},
      {"pair_local_expert", [](StepSlice& s) { s.pair_local_expert[0] = -1; }},
      {"return_send_counts", [](StepSlice& s) { ++s.return_send_counts[0]; }},
      {"return_recv_counts", [](StepSlice& s) { s.return_recv_counts.clear(); }},
      {"sum_offsets", [](StepSlice& s) { s.sum_offsets.push_back(0); }},
      {"sum_offsets", [](StepSlice& s) { s.sum_offsets.back() += 1; }},
      {"sum_rows", [](StepSlice& s) { s.sum_rows[0] = 1 << 20; }},
      {"sum_rows", [](StepSlice& s) { s.sum_rows[0] = -1; }},
      {"sum_weights", [](StepSlice& s) { s.sum_weights.push_back(1); }},
  };
  for (const CombineMode combine : {CombineMode::kSum, CombineMode::kPerExpert}) {
    ASSERT_TRUE(Check(GoodSlice(combine)).ok()) << Check(GoodSlice(combine));
    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE("case " + std::to_string(i) + " " + CombineModeName(combine));
      StepSlice slice = GoodSlice(combine);
      cases[i].spoil(slice);
      const absl::Status status = Check(slice);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(cases[i].field));
    }
  }
}

TEST(SliceCheckTest, RefusesGatherThatIsInconsistent) {
  const StepSlice good = GoodSlice(CombineMode::kSum, DispatchMode::kAllGatherReduceScatter);
  ASSERT_TRUE(Check(good).ok()) << Check(good);
  const int64_t huge = std::numeric_limits<int64_t>::max();
  const std::vector<std::pair<std::string, std::function<void(StepSlice&)>>> cases = {
      {"gather_counts", [](StepSlice& s) { s.gather_counts.pop_back(); }},
      {"gather_counts", [](StepSlice& s) { s.gather_counts[0] = -1; }},
      {"gather_counts", [=](StepSlice& s) { s.gather_counts[2] = huge; }},
      {"gather_counts",
       [](StepSlice& s) {
         s.gather_counts[0] = 0x7fffffff - s.gather_counts[1] - s.gather_counts[2];
       }},
      {"gather_counts", [](StepSlice& s) { ++s.gather_counts[kRank]; }},
      {"gather_counts", [](StepSlice& s) { s.header.strategy = DispatchMode::kAllToAll; }},
      {"gather_rows", [](StepSlice& s) { s.gather_rows.pop_back(); }},
      {"gather_rows", [](StepSlice& s) { s.gather_rows[0] = -1; }},
      {"gather_rows", [](StepSlice& s) { s.gather_rows.back() = 1 << 20; }},
      // Of another source: its block may be shorter than this rank believes.
      {"gather_rows", [](StepSlice& s) { s.gather_rows[0] = s.gather_rows.back(); }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE("case " + std::to_string(i));
    StepSlice slice = good;
    cases[i].second(slice);
    const absl::Status status = Check(slice);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(cases[i].first));
  }
}

TEST(SliceCheckTest, RefusesSlotsThatAreInconsistent) {
  const std::vector<std::pair<std::string, std::function<void(StepSlice&)>>> cases = {
      {"max_num_tokens", [](StepSlice& s) { s.max_num_tokens = 0; }},
      {"max_num_tokens", [](StepSlice& s) { s.max_num_tokens = -1; }},
      {"max_num_tokens",
       [](StepSlice& s) { s.max_num_tokens = std::numeric_limits<int64_t>::max(); }},
      // Fits an int32, but not what follows from it.
      {"max_num_tokens", [](StepSlice& s) { s.max_num_tokens = 0x7fffffff / kRanks; }},
      {"max_num_tokens", [](StepSlice& s) { s.max_topk = 0x7fffffff; }},
      {"max_topk", [](StepSlice& s) { s.max_topk = -1; }},
      {"send_counts", [](StepSlice& s) { s.max_num_tokens = s.send_counts[0] - 1; }},
      {"rows, there are 1 slots", [](StepSlice& s) { s.max_num_tokens = 1; }},
      {"pair_offsets", [](StepSlice& s) { s.max_topk = 1; }},
      {"max_num_tokens", [](StepSlice& s) { s.header.strategy = DispatchMode::kAllToAll; }},
      {"max_topk",
       [](StepSlice& s) {
         s.header.strategy = DispatchMode::kAllToAll;
         s.max_num_tokens = 0;
       }},
  };
  for (const CombineMode combine : {CombineMode::kSum, CombineMode::kPerExpert}) {
    const StepSlice good = GoodSlice(combine, DispatchMode::kAllToAllFixedCapacity);
    ASSERT_TRUE(Check(good).ok()) << Check(good);
    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE("case " + std::to_string(i) + " " + CombineModeName(combine));
      StepSlice slice = good;
      cases[i].second(slice);
      const absl::Status status = Check(slice);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(cases[i].first));
    }
  }
}

TEST(SliceCheckTest, RefusesDirectThatIsInconsistent) {
  const int64_t far = 1 << 20;
  const std::vector<std::pair<std::string, std::function<void(StepSlice&)>>> cases = {
      {"recv_counts",
       [](StepSlice& s) {
         s.send_counts[0] = 1;
         s.send_rows.push_back(0);
       }},
      {"return_recv_counts", [](StepSlice& s) { s.return_recv_counts[2] = 1; }},
      {"send_counts", [=](StepSlice& s) { s.return_recv_counts[kRank] = far; }},
      {"send_rows", [=](StepSlice& s) { s.send_rows[0] = far; }},
      {"output_dtype", [](StepSlice& s) { s.header.output_dtype = DType::kFloat32; }},
      {"include_shared_experts", [](StepSlice& s) { s.header.include_shared_experts = true; }},
      {"sum_offsets", [](StepSlice& s) { s.sum_offsets = {0}; }},
      {"sum_rows", [](StepSlice& s) { s.sum_rows = {0}; }},
      {"sum_weights", [](StepSlice& s) { s.sum_weights = {1}; }},
      {"gather_counts",
       [](StepSlice& s) {
         s.gather_counts = {0, 0, 0};
       }},
  };
  for (const CombineMode combine : {CombineMode::kSum, CombineMode::kPerExpert}) {
    const StepSlice good = GoodSlice(combine, DispatchMode::kDirect);
    ASSERT_TRUE(Check(good).ok()) << Check(good);
    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE("case " + std::to_string(i));
      StepSlice slice = good;
      cases[i].second(slice);
      const absl::Status status = Check(slice);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(cases[i].first));
    }
    StepSlice other = GoodSlice(combine, DispatchMode::kAllToAll);
    other.header.strategy = DispatchMode::kDirect;
    EXPECT_FALSE(Check(other).ok()) << "its rows would never come";
  }
}

// With any array entry replaced by anything, the check itself stays within bounds (the sanitizer
// builds would tell).
TEST(SliceCheckTest, SurvivesRandomDamage) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    StepSlice slice = GoodSlice(seed % 2 == 0 ? CombineMode::kSum : CombineMode::kPerExpert,
                                seed % 3 == 0   ? DispatchMode::kDirect
                                : seed % 3 == 1 ? DispatchMode::kAllToAll
                                                : DispatchMode::kAllGatherReduceScatter);
    const std::vector<std::vector<int64_t>*> wide = {&slice.send_counts,
                                                     &slice.recv_counts,
                                                     &slice.pair_offsets,
                                                     &slice.return_send_counts,
                                                     &slice.return_recv_counts,
                                                     &slice.sum_offsets,
                                                     &slice.sum_rows};
    std::vector<int64_t>& array = *wide[random() % wide.size()];
    if (array.empty()) array.resize(1);
    const size_t index = random() % array.size();
    switch (random() % 3) {
      case 0:
        array[index] = static_cast<int64_t>(random());
        break;
      case 1:
        array[index] += static_cast<int64_t>(random() % 5) - 2;
        break;
      default:
        array.resize(random() % (2 * array.size()));
    }
    Check(slice).IgnoreError();
  }
}

}  // namespace
}  // namespace expertmesh
