// Copyright 2026 The ExpertMesh Authors
// SPDX-License-Identifier: Apache-2.0

#include "tests/reference/reference_router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace expertmesh {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Logits whose softmax is the given probabilities.
std::vector<double> LogitsOf(std::vector<double> probabilities) {
  for (double& p : probabilities) p = std::log(p);
  return probabilities;
}

TEST(ReferenceRouter, SoftmaxTopK) {
  ReferenceRouterRule rule;
  rule.topk = 2;
  const std::vector<double> logits = LogitsOf({0.1, 0.5, 0.1, 0.3});
  ReferenceRouting routing = ReferenceRoute(rule, logits, 4);
  EXPECT_THAT(routing.topk_ids, ElementsAre(1, 3));
  EXPECT_THAT(routing.topk_weights, ElementsAre(DoubleNear(0.5, 1e-15), DoubleNear(0.3, 1e-15)));
  rule.renormalize = true;
  rule.scaling_factor = 2.0;
  routing = ReferenceRoute(rule, logits, 4);
  EXPECT_THAT(routing.topk_weights, ElementsAre(DoubleNear(1.25, 1e-15), DoubleNear(0.75, 1e-15)));
}

TEST(ReferenceRouter, TiesGoToTheLowestId) {
  ReferenceRouterRule rule;
  rule.topk = 3;
  EXPECT_THAT(ReferenceRoute(rule, {0, 1, 0, 1, 0, 0, 0, 0, 0, 0}, 5).topk_ids,
              ElementsAre(1, 3, 0, 0, 1, 2));
}

TEST(ReferenceRouter, SigmoidWithBiasChoosesButDoesNotWeigh) {
  ReferenceRouterRule rule;
  rule.score = ReferenceScore::kSigmoid;
  rule.topk = 2;
  rule.correction_bias = {1.0, 0.0, 0.0};
  rule.renormalize = true;
  rule.renormalize_epsilon = 1e-20;
  rule.scaling_factor = 2.5;
  const ReferenceRouting routing = ReferenceRoute(rule, {-2.0, 0.5, 1.0}, 3);
  EXPECT_THAT(routing.topk_ids, ElementsAre(0, 2));
  const double sum = Sigmoid(-2.0) + Sigmoid(1.0);
  EXPECT_THAT(routing.topk_weights, ElementsAre(DoubleNear(2.5 * Sigmoid(-2.0) / sum, 1e-15),
                                                DoubleNear(2.5 * Sigmoid(1.0) / sum, 1e-15)));
}

TEST(ReferenceRouter, RenormalizeMinimumKeepsSmallSumsSmall) {
  ReferenceRouterRule rule;
  rule.topk = 1;
  rule.renormalize = true;
  rule.renormalize_min = 0.5;
  EXPECT_NEAR(ReferenceRoute(rule, {0.0, 0.0, 0.0, 0.0}, 4).topk_weights[0], 0.5, 1e-15);
}

TEST(ReferenceRouter, Groups) {
  ReferenceRouterRule rule;
  rule.topk = 2;
  rule.num_groups = 2;
  rule.topk_groups = 1;
  // By max the first group wins, by sum of top two the second.
  const std::vector<double> logits = LogitsOf({0.40, 0.05, 0.01, 0.04, 0.26, 0.24});
  EXPECT_THAT(ReferenceRoute(rule, logits, 6).topk_ids, ElementsAre(0, 1));
  rule.group_score = ReferenceGroupScore::kSumOfTopTwo;
  EXPECT_THAT(ReferenceRoute(rule, logits, 6).topk_ids, ElementsAre(4, 5));
}

TEST(ReferenceRouter, MaskedGroupsCompeteWithZeroOnlyIfAsked) {
  ReferenceRouterRule rule;
  rule.score = ReferenceScore::kSigmoid;
  rule.topk = 2;
  rule.num_groups = 2;
  rule.group_score = ReferenceGroupScore::kSumOfTopTwo;
  rule.correction_bias = {0.0, -1.0, -1.0, -1.0};
  const std::vector<double> logits = {0.0, 0.0, 0.0, 0.0};
  EXPECT_THAT(ReferenceRoute(rule, logits, 4).topk_ids, ElementsAre(0, 1));
  rule.masked_groups_score_zero = true;
  EXPECT_THAT(ReferenceRoute(rule, logits, 4).topk_ids, ElementsAre(0, 2));
}

TEST(ReferenceRouter, ScoresOfTheSelectedAlone) {
  ReferenceRouterRule rule;
  rule.topk = 2;
  rule.score = ReferenceScore::kSoftmaxOverTopK;
  const std::vector<double> logits = {std::log(3.0), 9.0, 0.0, 9.0 + std::log(3.0)};
  ReferenceRouting routing = ReferenceRoute(rule, logits, 4);
  EXPECT_THAT(routing.topk_ids, ElementsAre(3, 1));
  EXPECT_THAT(routing.topk_weights, ElementsAre(DoubleNear(0.75, 1e-15), DoubleNear(0.25, 1e-15)));
  rule.score = ReferenceScore::kSigmoidOfTopK;
  routing = ReferenceRoute(rule, {0.0, -1.0, 1.0}, 3);
  EXPECT_THAT(routing.topk_ids, ElementsAre(2, 0));
  EXPECT_THAT(routing.topk_weights, ElementsAre(DoubleNear(Sigmoid(1.0), 1e-15), 0.5));
}

TEST(ReferenceRouter, SparseMixerSeesOnlyNearbyLogits) {
  ReferenceRouterRule rule;
  rule.score = ReferenceScore::kSparseMixer;
  rule.topk = 2;
  rule.sparse_mixer_jitter = 0.01;
  // Round one: 9.9 lies within 2% of 10, 9.7 does not. Round two: 9.9 leads, 9.7 (2.02% off) is
  // out; 10 is excluded.
  ReferenceRouting routing = ReferenceRoute(rule, {9.7, 10.0, 9.9, 1.0}, 4);
  EXPECT_THAT(routing.topk_ids, ElementsAre(1, 2));
  EXPECT_THAT(routing.topk_weights, ElementsAre(DoubleNear(Sigmoid(0.1), 1e-12), 1.0));
  routing = ReferenceRoute(rule, {9.75, 10.0, 9.9, 1.0}, 4);
  EXPECT_THAT(routing.topk_weights,
              ElementsAre(DoubleNear(Sigmoid(0.1), 1e-12), DoubleNear(Sigmoid(0.15), 1e-12)));
}

TEST(ReferenceRouter, GateLogits) {
  EXPECT_THAT(ReferenceRouterLogits({1, 2, 3, 4}, {1, 0, 0, 1, 1, 1}, {0, 0, 10}, 2, 3),
              ElementsAre(1, 2, 13, 3, 4, 17));
  EXPECT_THAT(ReferenceRouterLogits({1, 2}, {1, 1}, {}, 2, 1), ElementsAre(3));
}

}  // namespace
}  // namespace expertmesh
