// Copyright 2026 The ExpertMesh Authors
// SPDX-License-Identifier: Apache-2.0

#include "tests/reference/reference_moe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace expertmesh {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double Silu(double x) { return x / (1.0 + std::exp(-x)); }

// Two experts, hidden_size 2, intermediate_size 1. Expert 0: gate = x0, up = x1, out = (a, 2a).
// Expert 1: gate = x0 + x1, up = 3 x0, out = (-a, a).
ReferenceExperts TwoExperts() {
  ReferenceExperts experts;
  experts.num_experts = 2;
  experts.hidden_size = 2;
  experts.intermediate_size = 1;
  experts.w13 = {1, 0, 0, 1, 1, 1, 3, 0};
  experts.w2 = {1, 2, -1, 1};
  return experts;
}

ReferenceExperts RandomExperts(std::mt19937_64* random, int64_t e, int64_t h, int64_t i) {
  std::normal_distribution<double> normal;
  ReferenceExperts experts;
  experts.num_experts = e;
  experts.hidden_size = h;
  experts.intermediate_size = i;
  experts.w13.resize(static_cast<size_t>(e * 2 * i * h));
  experts.w2.resize(static_cast<size_t>(e * h * i));
  for (double& w : experts.w13) w = normal(*random) / std::sqrt(static_cast<double>(h));
  for (double& w : experts.w2) w = normal(*random) / std::sqrt(static_cast<double>(i));
  return experts;
}

TEST(ReferenceMoe, WeighsExpertsByHand) {
  const std::vector<double> hidden = {0.5, 2.0};
  const double a0 = Silu(0.5) * 2.0;
  const double a1 = Silu(2.5) * 1.5;
  const std::vector<double> out = ReferenceForward(TwoExperts(), hidden, {1, 0}, {0.25, 0.5}, 2);
  EXPECT_THAT(out, ElementsAre(DoubleNear(0.5 * a0 - 0.25 * a1, 1e-15),
                               DoubleNear(0.5 * 2 * a0 + 0.25 * a1, 1e-15)));
}

TEST(ReferenceMoe, DuplicateIdIsWeightedTwice) {
  const std::vector<double> hidden = {0.5, 2.0};
  EXPECT_EQ(ReferenceForward(TwoExperts(), hidden, {0, 0}, {0.25, 0.5}, 2),
            ReferenceForward(TwoExperts(), hidden, {0, -1}, {0.75, 1.0}, 2));
}

TEST(ReferenceMoe, NothingBesideMinusOneIsRead) {
  const std::vector<double> out = ReferenceForward(TwoExperts(), {kNan, kNan, 1.0, 1.0},
                                                   {-1, -1, -1, 0}, {kNan, kNan, kNan, 1.0}, 2);
  EXPECT_THAT(
      out, ElementsAre(0.0, 0.0, DoubleNear(Silu(1.0), 1e-15), DoubleNear(2 * Silu(1.0), 1e-15)));
}

TEST(ReferenceMoe, NoTokens) { EXPECT_TRUE(ReferenceForward(TwoExperts(), {}, {}, {}, 3).empty()); }

TEST(ReferenceMoe, WeightOnInputGoesThroughTheActivation) {
  ReferenceForwardOptions options;
  options.apply_router_weight_on_input = true;
  const std::vector<double> out =
      ReferenceForward(TwoExperts(), {0.5, 2.0}, {0}, {0.5}, 1, options);
  const double a = Silu(0.25) * 1.0;
  EXPECT_THAT(out, ElementsAre(DoubleNear(a, 1e-15), DoubleNear(2 * a, 1e-15)));

  // 1 + 2^-9 rounds to 1 in bfloat16, so weight and product leave the row as it was.
  options.weighted_input = ReferenceRounding::kBFloat16;
  EXPECT_EQ(ReferenceForward(TwoExperts(), {0.5, 2.0}, {0}, {1.0 + 0x1p-9}, 1, options),
            ReferenceForward(TwoExperts(), {0.5, 2.0}, {0}, {1.0}, 1));
}

TEST(ReferenceMoe, Activations) {
  ReferenceExperts experts = TwoExperts();
  experts.activation = ReferenceActivation::kGeluMul;
  EXPECT_NEAR(ReferenceForward(experts, {1.0, 2.0}, {0}, {1.0}, 1)[0], 2.0 * 0.8413447460685429,
              1e-14);
  experts.activation = ReferenceActivation::kGeluTanhMul;
  EXPECT_NEAR(ReferenceForward(experts, {1.0, 2.0}, {0}, {1.0}, 1)[0], 2.0 * 0.8411919906082768,
              1e-14);
}

TEST(ReferenceMoe, ClampedSwigluWithBiases) {
  ReferenceExperts experts = TwoExperts();
  experts.activation = ReferenceActivation::kClampedSwiglu;
  experts.w13_bias = {1.0, -1.0, 0.0, 0.0};
  experts.w2_bias = {10.0, 20.0, 0.0, 0.0};
  const auto glu = [](double g) { return g / (1.0 + std::exp(-1.702 * g)); };
  // gate 0.5 + 1, up 2 - 1; the output's bias is weighted too.
  double a = glu(1.5) * 2.0;
  EXPECT_THAT(
      ReferenceForward(experts, {0.5, 2.0}, {0}, {0.5}, 1),
      ElementsAre(DoubleNear(0.5 * (a + 10.0), 1e-14), DoubleNear(0.5 * (2 * a + 20.0), 1e-14)));
  // The gate is clamped above only, up on both sides.
  a = glu(7.0) * (-7.0 + 1.0);
  EXPECT_NEAR(ReferenceForward(experts, {100.0, -100.0}, {0}, {1.0}, 1)[0], a + 10.0, 1e-12);
  a = glu(-99.0) * 8.0;
  EXPECT_NEAR(ReferenceForward(experts, {-100.0, 100.0}, {0}, {1.0}, 1)[0], a + 10.0, 1e-12);
}

TEST(ReferenceMoe, RoundsToNearestEven) {
  const auto bf16 = ReferenceRounding::kBFloat16;
  EXPECT_EQ(ReferenceRound(1.0 + 0x1p-8, bf16), 1.0);
  EXPECT_EQ(ReferenceRound(1.0 + 0x3p-8, bf16), 1.0 + 0x1p-6);
  EXPECT_EQ(ReferenceRound(-(1.0 + 0x1.01p-8), bf16), -(1.0 + 0x1p-7));
  EXPECT_EQ(ReferenceRound(0x1p-133, bf16), 0x1p-133);
  EXPECT_EQ(ReferenceRound(0x1p-134, bf16), 0.0);
  const auto f16 = ReferenceRounding::kFloat16;
  EXPECT_EQ(ReferenceRound(65519.0, f16), 65504.0);
  EXPECT_EQ(ReferenceRound(65520.0, f16), std::numeric_limits<double>::infinity());
  EXPECT_EQ(ReferenceRound(0x1p-24, f16), 0x1p-24);
  EXPECT_EQ(ReferenceRound(0x1.8p-24, f16), 0x1p-23);
  EXPECT_EQ(ReferenceRound(0x1p-25, f16), 0.0);
  EXPECT_TRUE(std::isnan(ReferenceRound(kNan, f16)));
}

TEST(ReferenceMoe, RoundsAsTheHardwareDoes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 100000; ++i) {
    const uint64_t bits = random();
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    if (!std::isfinite(value)) continue;
    if (i % 2 == 0) {  // half of them near and below float32's range
      int exponent = 0;
      value = std::ldexp(std::frexp(value, &exponent), static_cast<int>(bits % 300) - 150);
    }
    ASSERT_EQ(ReferenceRound(value, ReferenceRounding::kFloat32),
              static_cast<double>(static_cast<float>(value)))
        << value;
  }
}

TEST(ReferenceMoe, PartialsRoundPerOwnerOrPerExpert) {
  ReferenceExperts experts;
  experts.num_experts = 3;
  experts.hidden_size = 1;
  experts.intermediate_size = 1;
  experts.w13 = {0, 0, 0, 0, 0, 0};
  experts.w2 = {0, 0, 0};
  // Only biases speak: expert outputs 1, 2^-8, 2^-8.
  experts.w2_bias = {1.0, 0x1p-8, 0x1p-8};
  const std::vector<int32_t> ids = {0, 1, 2};
  const std::vector<double> weights = {1.0, 1.0, 1.0};
  ReferenceForwardOptions options;
  options.partial = ReferenceRounding::kBFloat16;
  EXPECT_EQ(ReferenceForward(experts, {1.0}, ids, weights, 3, options)[0], 1.0 + 0x1p-7);
  options.owner_of_expert = {0, 0, 1};  // 1 + 2^-8 ties to 1, then 2^-8 is added
  EXPECT_EQ(ReferenceForward(experts, {1.0}, ids, weights, 3, options)[0], 1.0 + 0x1p-8);
  options.output = ReferenceRounding::kBFloat16;
  EXPECT_EQ(ReferenceForward(experts, {1.0}, ids, weights, 3, options)[0], 1.0);
  options.per_expert_partials = true;
  EXPECT_EQ(ReferenceForward(experts, {1.0}, ids, weights, 3, options)[0], 1.0 + 0x1p-7);
}

TEST(ReferenceMoe, ErrorBoundHoldsAndIsNotLoose) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (const auto rounding :
       {ReferenceRounding::kFloat32, ReferenceRounding::kFloat16, ReferenceRounding::kBFloat16}) {
    for (const bool on_input : {false, true}) {
      const ReferenceExperts experts = RandomExperts(&random, 4, 48, 40);
      std::vector<double> hidden(5 * 48);
      for (double& x : hidden) x = ReferenceRound(normal(random), rounding);
      std::vector<int32_t> ids;
      std::vector<double> weights;
      for (int i = 0; i < 5 * 3; ++i) {
        ids.push_back(static_cast<int32_t>(random() % 5) - 1);
        weights.push_back(0.1 + std::abs(normal(random)));
      }
      ReferenceForwardOptions options;
      options.apply_router_weight_on_input = on_input;
      const std::vector<double> exact = ReferenceForward(experts, hidden, ids, weights, 3, options);
      ReferenceErrorModel model;
      model.sum = 0.0;
      options.weighted_input = model.weighted_input = rounding;
      options.intermediate = model.intermediate = rounding;
      options.partial = model.partial = rounding;
      options.output = model.output = rounding;
      const std::vector<double> rounded =
          ReferenceForward(experts, hidden, ids, weights, 3, options);
      const std::vector<double> bound =
          ReferenceErrorBound(experts, hidden, ids, weights, 3, model, on_input);
      double largest_share = 0.0;
      for (size_t i = 0; i < exact.size(); ++i) {
        const double error = std::abs(rounded[i] - exact[i]);
        ASSERT_LE(error, bound[i]) << i;
        if (bound[i] > 0.0) largest_share = std::max(largest_share, error / bound[i]);
      }
      // For float32 the exp term, which this comparison does not exercise, is most of the bound.
      EXPECT_GT(largest_share, rounding == ReferenceRounding::kFloat32 ? 0.002 : 0.01);
    }
  }
}

}  // namespace
}  // namespace expertmesh
