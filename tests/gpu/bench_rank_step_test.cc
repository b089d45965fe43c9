#include "tests/gpu/bench_rank_step.h"

#include <algorithm>
#include <vector>

#include "gtest/gtest.h"
#include "tests/gpu/routed_experts.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"

namespace expertmesh {
namespace {

TEST(BenchRankStepTest, TellsTheStepAndWhatIsNotKernels) {
  ResetEmulatedCuda();
  ResultTable table;
  BenchContext context;
  context.table = &table;
  context.step_kernel_seconds = 1e-6;
  BenchRankStep(context, {.num_tokens = 3,
                          .hidden_size = 32,
                          .intermediate_size = 16,
                          .num_experts = 4,
                          .topk = 2,
                          .num_steps = 3});
  ASSERT_EQ(table.results().size(), 3u);
  EXPECT_EQ(table.results()[0].name, "rank step T=3 H=32 I=16 E=4 k=2 bf16, whole");
  EXPECT_GT(table.results()[0].value, 1);
  EXPECT_NEAR(table.results()[2].value, table.results()[0].value - 1, 1e-6);
  ResetEmulatedCuda();  // nothing of the rank is left
}

TEST(RoutedExpertsTest, EachTokenHasDifferentOnes) {
  const std::vector<int32_t> experts = RoutedExperts(5, 40, 3);
  ASSERT_EQ(experts.size(), 120u);
  for (size_t t = 0; t < 120; t += 3) {
    EXPECT_NE(experts[t], experts[t + 1]);
    EXPECT_NE(experts[t], experts[t + 2]);
    EXPECT_NE(experts[t + 1], experts[t + 2]);
  }
  const std::vector<int64_t> offsets = RoutedOffsets(5, 40, 3);
  ASSERT_EQ(offsets.size(), 6u);
  EXPECT_EQ(offsets.back(), 120);
  for (int32_t expert = 0; expert < 5; ++expert) {
    EXPECT_EQ(offsets[static_cast<size_t>(expert) + 1] - offsets[static_cast<size_t>(expert)],
              std::count(experts.begin(), experts.end(), expert));
  }
}

}  // namespace
}  // namespace expertmesh
