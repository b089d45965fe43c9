#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/control/step_controller.h"
#include "tests/server/control/control_fixture.h"

namespace expertmesh {
namespace {

// Calls whose experts the service chooses.
class StepControllerRoutingTest : public ControlFixture {
 protected:
  StepControllerRoutingTest() {
    auto gate_weights = std::make_unique<LoadedGate>();
    // Expert e's logit is the row's element e.
    gate_weights->weight.assign(6 * 8, 0.0f);
    for (int e = 0; e < 6; ++e) gate_weights->weight[e * 8 + e] = 1.0f;
    routers.Add(model.name, *NewRouter(model, model.layers[0], std::move(gate_weights)));
  }

  // Two tokens, whose two best experts are 4, 2 and 0, 5 with equal weights of 1/2.
  TestCall MakeRouted(RoutingKind kind) {
    TestCall test = MakeCall({.num_tokens = 2});
    ForwardCall& call = *test.call;
    call.routing = kind;
    call.topk_ids = Buffer();
    call.topk_weights = Buffer();
    const std::vector<float> hidden = {0, 1, 5, 2, 5, 3, 0, 0, 7, 1, 2, 3, 4, 7, 0, 0};
    std::memcpy(call.hidden_states.data(), hidden.data(), hidden.size() * 4);
    if (kind == RoutingKind::kRouterLogits) {
      call.router_logits_dtype = DType::kFloat32;
      call.router_logits = *group.pool()->Allocate(2 * 6 * 4);
      for (int t = 0; t < 2; ++t) {
        std::memcpy(call.router_logits.data() + t * 24, hidden.data() + t * 8, 24);
      }
    }
    test.expected.clear();
    for (int i = 0; i < 16; ++i) {
      test.expected.push_back(hidden[i] * (i < 8 ? 0.5f * (3 + 5) : 0.5f * (1 + 6)));
    }
    return test;
  }
};

TEST_F(StepControllerRoutingTest, LogitsAndGateAreRoutedByTheModelsRule) {
  Start();
  for (const bool may_run_inline : {false, true}) {
    for (const RoutingKind kind : {RoutingKind::kRouterLogits, RoutingKind::kServerGate}) {
      TestCall call = MakeRouted(kind);
      call.call->want_stats = true;
      Submit(call, may_run_inline);
      ExpectExact(call);
      EXPECT_EQ(call.answer->Wait()->stats.tokens_per_expert,
                (std::vector<int64_t>{1, 0, 1, 0, 1, 1}));
    }
  }
}

TEST_F(StepControllerRoutingTest, BadLogitsFailTheirCallAlone) {
  Start();
  TestCall blocker = SubmitBlocker();
  TestCall before = MakeRouted(RoutingKind::kRouterLogits);
  TestCall bad = MakeRouted(RoutingKind::kRouterLogits);
  TestCall after = MakeRouted(RoutingKind::kRouterLogits);
  const float nan = std::nanf("");
  std::memcpy(bad.call->router_logits.data() + 24, &nan, sizeof(nan));
  for (TestCall* call : {&before, &bad, &after}) Submit(*call);
  gate.Open();
  ExpectExact(before);
  ExpectExact(after);
  EXPECT_EQ(bad.answer->WaitCode(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetCallErrorDetails(bad.answer->Wait().status())->field, "router_logits");
  EXPECT_EQ(group.seen()[1].num_tokens, 4);
  ExpectNothingInFlight();
}

// Routing all of a long call at once would hold up the others: the error in its last token is met
// only when that has its turn.
TEST_F(StepControllerRoutingTest, ALongCallIsRoutedStepByStep) {
  options.max_step_tokens = 4;
  for (const bool bad : {false, true}) {
    Start();
    TestCall call = MakeRouted(RoutingKind::kRouterLogits);
    TestCall rows = MakeCall({.num_tokens = 20});
    rows.call->router_logits = *group.pool()->Allocate(20 * 24);
    std::vector<float> expected;
    for (int i = 0; i < 10; ++i) {
      std::memcpy(rows.call->router_logits.data() + i * 48, call.call->router_logits.data(), 48);
      std::memcpy(rows.call->hidden_states.data() + i * 64, call.call->hidden_states.data(), 64);
      expected.insert(expected.end(), call.expected.begin(), call.expected.end());
    }
    call.expected = expected;
    if (bad) {
      const float nan = std::nanf("");
      std::memcpy(rows.call->router_logits.data() + 19 * 24, &nan, sizeof(nan));
    }
    call.call->num_tokens = 20;
    call.call->router_logits = std::move(rows.call->router_logits);
    call.call->hidden_states = std::move(rows.call->hidden_states);
    const size_t steps_before = group.seen().size();
    Submit(call);
    if (bad) {
      const absl::Status status = call.answer->Wait().status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(GetCallErrorDetails(status)->value,
                "NaN at token 3, expert 0, counted from token 16");
      EXPECT_EQ(group.seen().size() - steps_before, 4u);
    } else {
      ExpectExact(call);
      EXPECT_EQ(group.seen().size() - steps_before, 5u);
    }
    ExpectNothingInFlight();
  }
}

TEST_F(StepControllerRoutingTest, WhatTheRouterChoosesIsCounted) {
  Start();
  TestCall blocker = SubmitBlocker();
  const int64_t before = controller->Snapshot().bytes_in_flight;
  TestCall call = MakeRouted(RoutingKind::kServerGate);
  Submit(call);
  // Two rows of eight floats in and out, and two pairs each.
  EXPECT_EQ(controller->Snapshot().bytes_in_flight - before, 2 * 2 * 32 + 2 * 2 * 8);
  gate.Open();
  ExpectExact(call);
}

// Zero times an infinite weight would be NaN.
TEST_F(StepControllerRoutingTest, WeightsOnInputMustBeFiniteInItsType) {
  LayerSpec& layer = model.layers[0];
  layer.router.routed_scaling_factor = 200000.0f;  // times weights of 1/2
  routers.Add(model.name, *NewRouter(model, layer, nullptr));
  Start();
  for (const bool weight_on_input : {true, false}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      TestCall call = MakeRouted(RoutingKind::kRouterLogits);
      call.call->apply_router_weight_on_input = weight_on_input;
      call.call->activation_dtype = dtype;
      Submit(call);
      const absl::Status status = call.answer->Wait().status();
      if (weight_on_input && dtype == DType::kFloat16) {
        ASSERT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_EQ(GetCallErrorDetails(status)->field, "router_logits");
      } else {
        EXPECT_TRUE(status.ok()) << status;
      }
    }
  }
}

TEST_F(StepControllerRoutingTest, WithoutRouterOnlyGivenTopKIsServed) {
  Start();
  TestCall call = MakeRouted(RoutingKind::kServerGate);
  call.call->layer = model.FindLayer(4);
  Submit(call);
  EXPECT_EQ(ReasonOf(call.answer->Wait().status()), ErrorReason::kNoGateWeights);
}

TEST_F(StepControllerRoutingTest, RoutingByTheServiceFollowsTheModelsHabitOfWeighingInputs) {
  model.apply_router_weight_on_input = true;
  Start();
  TestCall routed = MakeRouted(RoutingKind::kRouterLogits);
  TestCall given = MakeCall();
  Submit(routed);
  EXPECT_TRUE(routed.answer->Wait().ok());
  Submit(given);
  EXPECT_TRUE(given.answer->Wait().ok());
  EXPECT_TRUE(group.seen()[0].header.apply_router_weight_on_input);
  EXPECT_FALSE(group.seen()[1].header.apply_router_weight_on_input);
}

}  // namespace
}  // namespace expertmesh
