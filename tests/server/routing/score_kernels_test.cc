#include "server/routing/score_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "server/routing/topk_choice.h"

namespace expertmesh {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(ScoreKernelsTest, ExpIsExactToTwoUnitsOverItsWholeRange) {
  std::vector<float> row;
  for (double x = -87.3; x <= 0.0; x += 0.0037) row.push_back(static_cast<float>(x));
  row.resize(PaddedToRouterLanes(row.size()), -kInfinity);
  std::vector<float> exps(row.size());
  const float sum = ExpRow(row.data(), 0.0f, row.size(), exps.data());
  double expected_sum = 0.0;
  for (size_t i = 0; i < row.size(); ++i) {
    const double expected = std::exp(static_cast<double>(row[i]));
    expected_sum += expected;
    ASSERT_NEAR(exps[i], expected, expected * 0x1p-22) << "exp(" << row[i] << ")";
  }
  EXPECT_NEAR(sum, expected_sum, expected_sum * 1e-5);
}

TEST(ScoreKernelsTest, ExpVanishesFarBelowTheMaximum) {
  std::vector<float> row(kRouterLanes, -kInfinity);
  row[0] = 3.0f;
  row[1] = 3.0f - 200.0f;
  std::vector<float> exps(kRouterLanes, 7.0f);
  EXPECT_EQ(ExpRow(row.data(), 3.0f, kRouterLanes, exps.data()), 1.0f);
  EXPECT_EQ(exps[0], 1.0f);
  for (int i = 1; i < kRouterLanes; ++i) EXPECT_EQ(exps[i], 0.0f);
}

TEST(ScoreKernelsTest, SigmoidIsExactAndSaturates) {
  std::vector<float> row;
  for (double x = -80.0; x <= 80.0; x += 0.013) row.push_back(static_cast<float>(x));
  row.push_back(kInfinity);
  row.push_back(-kInfinity);
  row.push_back(std::numeric_limits<float>::max());
  row.resize(PaddedToRouterLanes(row.size()), 0.0f);
  std::vector<float> scores(row.size());
  SigmoidRow(row.data(), row.size(), scores.data());
  for (size_t i = 0; i < row.size(); ++i) {
    const double expected = 1.0 / (1.0 + std::exp(-static_cast<double>(row[i])));
    ASSERT_NEAR(scores[i], expected, expected * 0x1p-21 + 1e-37) << "sigmoid(" << row[i] << ")";
  }
}

TEST(ScoreKernelsTest, RangeFindsTheMaximumAndAnyNan) {
  std::vector<float> row(3 * kRouterLanes, -kInfinity);
  EXPECT_EQ(FindRange(row.data(), row.size()).max, -kInfinity);
  row[37] = -5.0f;
  EXPECT_EQ(FindRange(row.data(), row.size()).max, -5.0f);
  EXPECT_FALSE(FindRange(row.data(), row.size()).has_nan);
  for (size_t i = 0; i < row.size(); ++i) {
    std::vector<float> bad = row;
    bad[i] = std::nanf("");
    EXPECT_TRUE(FindRange(bad.data(), bad.size()).has_nan) << i;
  }
}

TEST(ScoreKernelsTest, TopKSurvivesTiesAndRestoresTheRow) {
  constexpr uint64_t kSeed = 9;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  for (const ScoreKernels& kernels : SupportedScoreKernels()) {
    SCOPED_TRACE(kernels.instruction_set);
    for (int round = 0; round < 300; ++round) {
      const int32_t size = 1 + random() % 90;
      const int32_t topk = random() % (size + 1);
      std::vector<float> row(PaddedToRouterLanes(size), -kInfinity);
      // Few distinct values: most rounds have ties around the last place.
      for (int32_t i = 0; i < size; ++i) row[i] = static_cast<float>(random() % 12);
      const std::vector<float> before = row;
      std::vector<int32_t> ids(topk), expected_ids(topk);
      std::vector<float> values(topk), expected_values(topk);
      ASSERT_TRUE(kernels.find_topk(row.data(), row.size(), topk, ids.data(), values.data()));
      EXPECT_EQ(row, before);
      ChooseTopK(row.data(), size, topk, expected_ids.data(), expected_values.data());
      ASSERT_EQ(ids, expected_ids);
      EXPECT_EQ(values, expected_values);
      std::vector<int32_t> order(size);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&row](int32_t a, int32_t b) { return row[a] > row[b]; });
      order.resize(topk);
      EXPECT_EQ(ids, order);
    }
    std::vector<float> scarce(kRouterLanes, -kInfinity);
    scarce[3] = scarce[9] = 1.0f;
    const std::vector<float> before = scarce;
    int32_t ids[3];
    float values[3];
    EXPECT_TRUE(kernels.find_topk(scarce.data(), kRouterLanes, 2, ids, values));
    EXPECT_FALSE(kernels.find_topk(scarce.data(), kRouterLanes, 3, ids, values));
    EXPECT_EQ(scarce, before);
  }
}

TEST(ScoreKernelsTest, EveryInstructionSetGivesTheSameBytes) {
  constexpr uint64_t kSeed = 20261129;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937_64 random(kSeed);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  constexpr int64_t kTokens = 7, kExperts = 12, kHidden = 7 * kRouterLanes;
  std::vector<float> rows(kTokens * kHidden), gate(kExperts * kHidden);
  for (float& value : rows) value = normal(random);
  for (float& value : gate) value = normal(random);

  struct Results {
    float sum;
    std::vector<float> exps, scores, logits;
  };
  std::vector<Results> results;
  const std::vector<ScoreKernels> all = SupportedScoreKernels();
  for (const ScoreKernels& kernels : all) {
    Results& result = results.emplace_back();
    result.exps.resize(rows.size());
    result.scores.resize(rows.size());
    result.logits.resize(kTokens * kExperts);
    const RowRange range = kernels.find_range(rows.data(), rows.size());
    result.sum = kernels.exp_row(rows.data(), range.max, rows.size(), result.exps.data());
    kernels.sigmoid_row(rows.data(), rows.size(), result.scores.data());
    kernels.gate_matmul({.rows = rows.data(),
                         .gate = gate.data(),
                         .num_tokens = kTokens,
                         .num_experts = kExperts,
                         .padded_hidden = kHidden,
                         .logits_stride = kExperts,
                         .logits = result.logits.data()});
  }
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  for (size_t i = 1; i < all.size(); ++i) {
    SCOPED_TRACE(all[i].instruction_set);
    EXPECT_EQ(results[i].sum, results[0].sum);
    EXPECT_TRUE(same(results[i].exps, results[0].exps));
    EXPECT_TRUE(same(results[i].scores, results[0].scores));
    EXPECT_TRUE(same(results[i].logits, results[0].logits));
  }
}

}  // namespace
}  // namespace expertmesh
