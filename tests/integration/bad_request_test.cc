#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "tests/integration/bad_requests.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

const RequestTarget& Target() {
  static const RequestTarget* const target =
      new RequestTarget{"qwen3_moe_bfloat16", /*layer=*/1, /*dense_layer=*/0, /*hidden_size=*/48,
                        /*num_experts=*/12};
  return *target;
}

std::unique_ptr<ServerUnderTest> StartServer() {
  return ServerUnderTest::Start(
      {.checkpoint = "tests/golden/qwen3_moe_bfloat16", .args = {"--local_ranks=2"}});
}

// Each bad request beside a good one whose answer must not change by a byte.
TEST(BadRequestTest, EachRuleWithCodeFieldValueAndLimit) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  const v1::ForwardRequest good = GoodRequest(Target(), 16, 3);
  const CallOutcome expected = server->Forward(good);
  ASSERT_TRUE(expected.ok()) << expected;
  for (const BadRequest& bad : BadRequests(Target())) {
    SCOPED_TRACE(bad.name);
    v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
    bad.spoil(&request);
    PendingForward beside = server->StartForward(good);
    const CallOutcome outcome = server->Forward(request);
    EXPECT_EQ(outcome.code, bad.code) << outcome;
    EXPECT_EQ(outcome.reason, bad.reason);
    EXPECT_EQ(outcome.field, bad.field);
    if (!bad.value.empty()) {
      EXPECT_EQ(outcome.value, bad.value);
    }
    if (!bad.limit.empty()) {
      EXPECT_EQ(outcome.limit, bad.limit);
    }
    if (bad.code == absl::StatusCode::kInvalidArgument) {
      EXPECT_EQ(outcome.bad_request_field, bad.field);
    }
    EXPECT_EQ(outcome.retry_after, absl::ZeroDuration());
    const CallOutcome untouched = beside.Wait();
    ASSERT_TRUE(untouched.ok()) << untouched;
    EXPECT_EQ(untouched.response.output().data(), expected.response.output().data());
  }
}

TEST(BadRequestTest, WhatOnlyLooksBadIsAnswered) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  for (const OddRequest& odd : OddButGoodRequests(Target())) {
    SCOPED_TRACE(odd.name);
    v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
    odd.change(&request);
    const CallOutcome outcome = server->Forward(request);
    ASSERT_TRUE(outcome.ok()) << outcome;
    const std::vector<double> output = OutputValues(outcome.response.output());
    EXPECT_EQ(output.size(),
              static_cast<size_t>(request.hidden_states().shape(0) * Target().hidden_size));
    for (const double value : output) ASSERT_FALSE(std::isnan(value));
  }
}

// NaN logits are found by the router, not by the validator.
TEST(BadRequestTest, RouterLogitsWithNaN) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  v1::Tensor* logits = request.mutable_router_logits();
  logits->set_dtype(v1::DATA_TYPE_FLOAT32);
  logits->add_shape(4);
  logits->add_shape(Target().num_experts);
  for (int i = 0; i < 4 * Target().num_experts; ++i) {
    logits->add_values(i == 30 ? std::nanf("") : static_cast<float>(i));
  }
  PendingForward beside = server->StartForward(GoodRequest(Target(), 16, 3));
  const CallOutcome outcome = server->Forward(request);
  EXPECT_EQ(outcome.code, absl::StatusCode::kInvalidArgument) << outcome;
  EXPECT_EQ(outcome.reason, "INVALID_FIELD");
  EXPECT_THAT(outcome.field, testing::StartsWith("router_logits"));
  EXPECT_EQ(outcome.value, "NaN at token 2, expert 6");
  EXPECT_TRUE(beside.Wait().ok());
}

TEST(BadRequestTest, EveryRowIsReadWhenTheServerRoutes) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  request.mutable_server_gate();
  request.mutable_hidden_states()->mutable_data()->replace(0, 2, "\xc0\x7f", 2);
  const CallOutcome outcome = server->Forward(request);
  EXPECT_EQ(outcome.code, absl::StatusCode::kInvalidArgument) << outcome;
  EXPECT_EQ(outcome.field, "hidden_states.data[0,0]");
}

TEST(BadRequestTest, ModelsByName) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  const auto missing = server->GetModel("other");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  const auto model = server->GetModel("");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->model(), "qwen3_moe_bfloat16");
  EXPECT_EQ(model->architecture(), "Qwen3MoeForCausalLM");
  EXPECT_EQ(model->hidden_size(), 48);
  EXPECT_EQ(model->ep_size(), 2);
  EXPECT_TRUE(model->ready());
  EXPECT_NE(model->epoch(), 0u);
  EXPECT_NE(model->incarnation(), 0u);
  ASSERT_EQ(model->layers_size(), 2);
  EXPECT_EQ(model->layers(0).index(), 1);
  EXPECT_EQ(model->layers(0).num_experts(), 12);
  EXPECT_EQ(model->layers(0).topk(), 5);
  EXPECT_TRUE(model->layers(0).has_gate());
  EXPECT_EQ(model->layers(0).router_rule(), "softmax, top 5, renormalized");
  // A request that carries the published fingerprint is served.
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  request.set_expected_fingerprint(model->fingerprint());
  EXPECT_TRUE(server->Forward(request).ok());
  const auto models = server->ListModels();
  ASSERT_TRUE(models.ok()) << models.status();
  ASSERT_EQ(models->models_size(), 1);
  EXPECT_EQ(models->models(0).model(), "qwen3_moe_bfloat16");
  EXPECT_TRUE(models->models(0).ready());
}

}  // namespace
}  // namespace expertmesh
