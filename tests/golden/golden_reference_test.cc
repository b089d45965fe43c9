// Copyright 2026 The ExpertMesh Authors
// SPDX-License-Identifier: Apache-2.0

// Oracle against oracle: the float64 reference must agree with what Transformers' own MoE blocks
// gave.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/golden/golden_fixture.h"
#include "tests/reference/reference_moe.h"
#include "tests/reference/reference_router.h"

namespace expertmesh {
namespace {

class GoldenReference : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { fixture_ = LoadGoldenFixture(GetParam()); }

  static ReferenceForwardOptions Options(const GoldenLayer& layer) {
    ReferenceForwardOptions options;
    options.apply_router_weight_on_input = layer.apply_router_weight_on_input;
    return options;
  }

  static double LargestDifference(const std::vector<double>& a, const std::vector<double>& b) {
    EXPECT_EQ(a.size(), b.size());
    double largest = 0.0;
    for (size_t i = 0; i < a.size(); ++i) {
      const double difference = std::abs(a[i] - b[i]);
      if (std::isnan(difference)) return difference;  // fails every comparison
      largest = std::max(largest, difference);
    }
    return largest;
  }

  // ids as sets with their weights: torch.topk(sorted=False) leaves the order open.
  static void ExpectRouting(const GoldenLayer& layer, const ReferenceRouting& routing,
                            double tolerance) {
    ASSERT_EQ(routing.topk_ids.size(), layer.ids.size());
    const size_t topk = static_cast<size_t>(layer.topk);
    for (size_t begin = 0; begin < layer.ids.size(); begin += topk) {
      std::map<int32_t, double> expected;
      for (size_t i = begin; i < begin + topk; ++i) {
        expected[layer.ids[i]] = layer.topk_weights.values[i];
      }
      for (size_t i = begin; i < begin + topk; ++i) {
        ASSERT_TRUE(expected.contains(routing.topk_ids[i])) << "token " << begin / topk;
        EXPECT_NEAR(routing.topk_weights[i], expected[routing.topk_ids[i]], tolerance);
      }
    }
  }

  GoldenFixture fixture_;
};

TEST_P(GoldenReference, GivenTopK) {
  for (const GoldenLayer& layer : fixture_.layers) {
    SCOPED_TRACE(layer.index);
    const std::vector<double> routed =
        ReferenceForward(layer.experts, layer.hidden_states.values, layer.ids,
                         layer.topk_weights.values, layer.topk, Options(layer));
    EXPECT_LE(LargestDifference(routed, layer.output_routed.values), layer.tolerance_routed);
    const std::vector<double> full = ReferenceAddShared(layer, layer.hidden_states.values, routed);
    EXPECT_LE(LargestDifference(full, layer.output_full.values), layer.tolerance_full);
  }
}

TEST_P(GoldenReference, RouterFromLogitsAndFromGate) {
  for (const GoldenLayer& layer : fixture_.layers) {
    SCOPED_TRACE(layer.index);
    ExpectRouting(layer,
                  ReferenceRoute(layer.router, layer.router_logits.values, layer.num_experts),
                  layer.tolerance_weights_logits);
    const ReferenceRouting routing = ReferenceRoute(
        layer.router,
        ReferenceRouterLogits(layer.hidden_states.values, layer.gate, layer.gate_bias,
                              fixture_.hidden_size, layer.num_experts),
        layer.num_experts);
    ExpectRouting(layer, routing, layer.tolerance_weights_gate);
    const std::vector<double> routed =
        ReferenceForward(layer.experts, layer.hidden_states.values, routing.topk_ids,
                         routing.topk_weights, layer.topk, Options(layer));
    EXPECT_LE(LargestDifference(routed, layer.output_routed.values), layer.tolerance_routed_router);
  }
}

// The tolerances must be able to tell a wrong answer: each wrong expert, weight or layout shows.
TEST_P(GoldenReference, TolerancesCatchMistakes) {
  for (const GoldenLayer& layer : fixture_.layers) {
    SCOPED_TRACE(layer.index);
    const auto error = [&layer](const ReferenceExperts& experts, const std::vector<int32_t>& ids,
                                const std::vector<double>& weights,
                                const ReferenceForwardOptions& options) {
      return LargestDifference(
          ReferenceForward(experts, layer.hidden_states.values, ids, weights, layer.topk, options),
          layer.output_routed.values);
    };
    std::vector<int32_t> other_ids = layer.ids;
    other_ids[0] = (other_ids[0] + 1) % layer.num_experts;
    EXPECT_GT(error(layer.experts, other_ids, layer.topk_weights.values, Options(layer)),
              layer.tolerance_routed_router);

    std::vector<double> other_weights = layer.topk_weights.values;
    for (double& weight : other_weights) weight *= 1.25;
    EXPECT_GT(error(layer.experts, layer.ids, other_weights, Options(layer)),
              layer.tolerance_routed);

    ReferenceForwardOptions options = Options(layer);
    options.apply_router_weight_on_input = !options.apply_router_weight_on_input;
    EXPECT_GT(error(layer.experts, layer.ids, layer.topk_weights.values, options),
              layer.tolerance_routed);

    ReferenceExperts swapped = layer.experts;  // gate and up exchanged
    const int64_t half = swapped.intermediate_size * swapped.hidden_size;
    for (int64_t e = 0; e < swapped.num_experts; ++e) {
      std::swap_ranges(swapped.w13.begin() + 2 * e * half, swapped.w13.begin() + (2 * e + 1) * half,
                       swapped.w13.begin() + (2 * e + 1) * half);
    }
    EXPECT_GT(error(swapped, layer.ids, layer.topk_weights.values, Options(layer)),
              layer.tolerance_routed);
  }
}

// Groups and correction bias must decide something in each fixture that has them.
TEST_P(GoldenReference, EveryPartOfTheRuleMatters) {
  bool has_bias = false;
  bool bias_matters = false;
  bool has_groups = false;
  bool groups_matter = false;
  for (const GoldenLayer& layer : fixture_.layers) {
    const auto ids_by = [&layer](const ReferenceRouterRule& rule) {
      std::vector<int32_t> ids =
          ReferenceRoute(rule, layer.router_logits.values, layer.num_experts).topk_ids;
      for (auto token = ids.begin(); token != ids.end(); token += layer.topk) {
        std::sort(token, token + layer.topk);
      }
      return ids;
    };
    ReferenceRouterRule unbiased = layer.router;
    unbiased.correction_bias.clear();
    has_bias |= !layer.router.correction_bias.empty();
    bias_matters |= ids_by(unbiased) != ids_by(layer.router);
    ReferenceRouterRule ungrouped = layer.router;
    ungrouped.num_groups = 1;
    has_groups |= layer.router.num_groups > 1;
    groups_matter |= ids_by(ungrouped) != ids_by(layer.router);
  }
  EXPECT_EQ(bias_matters, has_bias);
  EXPECT_EQ(groups_matter, has_groups);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, GoldenReference, ::testing::ValuesIn(GoldenFixtureNames()),
                         [](const auto& fixture) { return fixture.param; });

}  // namespace
}  // namespace expertmesh
