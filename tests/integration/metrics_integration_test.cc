// Every figure of /metrics against work that was counted here.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/bad_requests.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

const RequestTarget& Target() {
  static const RequestTarget* const target = new RequestTarget{"qwen3_moe_bfloat16", 1, 0, 48, 12};
  return *target;
}

std::string Calls(const std::string& method, const std::string& code) {
  return absl::StrCat("expertmesh_calls_total{code=\"", code, "\",method=\"", method, "\"}");
}

std::string Stage(const std::string& what, const std::string& stage) {
  return absl::StrCat("expertmesh_step_stage_seconds_", what, "{stage=\"", stage, "\"}");
}

class MetricsIntegrationTest : public testing::Test {
 protected:
  void SetUp() override {
    server_ = ServerUnderTest::Start(
        {.checkpoint = "tests/golden/qwen3_moe_bfloat16",
         .args = {"--local_ranks=2", "--max_step_tokens=50", "--allow_admin"}});
    ASSERT_NE(server_, nullptr);
  }
  std::unique_ptr<ServerUnderTest> server_;
};

TEST_F(MetricsIntegrationTest, FreshServerHasCountedNothing) {
  EXPECT_EQ(server_->Metric(Calls("Forward", "OK")), 0);
  EXPECT_EQ(server_->Metric("expertmesh_steps_total"), 0);
  EXPECT_EQ(server_->Metric("expertmesh_request_bytes_total"), 0);
  EXPECT_EQ(server_->Metric("expertmesh_ready"), 1);
}

// One after the other, so that no requests share a step.
TEST_F(MetricsIntegrationTest, CountsCallsTokensBytesAndSteps) {
  int64_t request_bytes = 0;
  int64_t response_bytes = 0;
  int64_t tokens = 0;
  int64_t steps = 0;
  double compute_seconds = 0;
  for (const int64_t num_tokens : {1, 7, 50, 51, 120}) {
    const v1::ForwardRequest request = GoodRequest(Target(), num_tokens, 2);
    const CallOutcome outcome = server_->Forward(request);
    ASSERT_TRUE(outcome.ok()) << outcome;
    request_bytes += static_cast<int64_t>(request.ByteSizeLong());
    response_bytes += static_cast<int64_t>(outcome.response.ByteSizeLong());
    tokens += num_tokens;
    steps += (num_tokens + 49) / 50;
    EXPECT_EQ(outcome.response.served_by().num_steps(), (num_tokens + 49) / 50);
    compute_seconds += static_cast<double>(outcome.response.timings().compute_micros()) * 1e-6;
  }
  std::vector<BadRequest> all_bad = BadRequests(Target());
  int64_t num_invalid = 0;
  int64_t num_not_found = 0;
  for (const BadRequest& bad : all_bad) {
    v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
    bad.spoil(&request);
    request_bytes += static_cast<int64_t>(request.ByteSizeLong());
    EXPECT_FALSE(server_->Forward(request).ok()) << bad.name;
    num_invalid += bad.code == absl::StatusCode::kInvalidArgument ? 1 : 0;
    num_not_found += bad.code == absl::StatusCode::kNotFound ? 1 : 0;
  }
  ASSERT_GT(num_not_found, 0);
  v1::ExplainRequest explain;
  *explain.mutable_request() = GoodRequest(Target(), 4, 2);
  EXPECT_TRUE(server_->Explain(explain).ok());
  explain.set_max_tokens(-1);
  EXPECT_FALSE(server_->Explain(explain).ok());
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(server_->GetModel("").ok());
  EXPECT_FALSE(server_->GetModel("other").ok());
  EXPECT_TRUE(server_->ListModels().ok());

  EXPECT_EQ(server_->Metric(Calls("Forward", "OK")), 5);
  EXPECT_EQ(server_->Metric(Calls("Forward", "INVALID_ARGUMENT")), num_invalid);
  EXPECT_EQ(server_->Metric(Calls("Forward", "NOT_FOUND")), num_not_found);
  const auto status = server_->GetStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->num_requests_ok(), 5u);
  EXPECT_EQ(status->num_requests_failed(), all_bad.size());
  EXPECT_EQ(server_->Metric("expertmesh_call_seconds_count{method=\"Forward\"}"),
            5 + static_cast<double>(all_bad.size()));
  EXPECT_EQ(server_->Metric("expertmesh_call_seconds_bucket{method=\"Forward\",le=\"+Inf\"}"),
            5 + static_cast<double>(all_bad.size()));
  EXPECT_GT(server_->Metric("expertmesh_call_seconds_sum{method=\"Forward\"}"), 0);
  EXPECT_EQ(server_->Metric(Calls("Explain", "OK")), 1);
  EXPECT_EQ(server_->Metric(Calls("Explain", "INVALID_ARGUMENT")), 1);
  EXPECT_EQ(server_->Metric(Calls("GetModel", "OK")), 3);
  EXPECT_EQ(server_->Metric(Calls("GetModel", "NOT_FOUND")), 1);
  EXPECT_EQ(server_->Metric(Calls("ListModels", "OK")), 1);
  EXPECT_GT(server_->Metric("expertmesh_call_seconds_sum{method=\"GetModel\"}"), 0);
  EXPECT_GT(server_->Metric("expertmesh_call_seconds_sum{method=\"ListModels\"}"), 0);

  EXPECT_EQ(server_->Metric("expertmesh_request_bytes_total"), request_bytes);
  // protobuf may order and pack the head otherwise; not by much.
  EXPECT_NEAR(server_->Metric("expertmesh_response_bytes_total"), response_bytes, 5 * 16);
  EXPECT_EQ(server_->Metric("expertmesh_request_tokens_total"), tokens);
  EXPECT_EQ(server_->Metric("expertmesh_steps_total"), steps);
  EXPECT_EQ(server_->Metric("expertmesh_failed_steps_total"), 0);
  EXPECT_EQ(server_->Metric("expertmesh_replayed_steps_total"), 0);
  EXPECT_EQ(server_->Metric("expertmesh_step_tokens_sum"), tokens);
  EXPECT_EQ(server_->Metric("expertmesh_step_tokens_count"), steps);
  EXPECT_EQ(server_->Metric("expertmesh_step_requests_sum"), steps);
  EXPECT_GT(server_->Metric("expertmesh_inline_steps_total"), 0);
  for (const char* stage : {"queue", "route", "plan", "dispatch", "compute", "combine"}) {
    EXPECT_EQ(server_->Metric(Stage("count", stage)), steps) << stage;
  }
  EXPECT_NEAR(server_->Metric(Stage("sum", "compute")), compute_seconds, 1e-9);
  for (const char* gauge :
       {"expertmesh_calls_in_flight{method=\"Forward\"}", "expertmesh_tokens_in_flight",
        "expertmesh_bytes_in_flight", "expertmesh_queued_requests", "expertmesh_queued_tokens"}) {
    EXPECT_EQ(server_->Metric(gauge), 0) << gauge;
  }
}

TEST_F(MetricsIntegrationTest, EveryFamilyIsExplainedAndPrefixed) {
  const std::string text = server_->Metrics();
  EXPECT_THAT(text, testing::HasSubstr("# HELP expertmesh_calls_total "));
  EXPECT_THAT(text, testing::HasSubstr("# TYPE expertmesh_call_seconds histogram"));
  EXPECT_THAT(HttpGet(server_->port(), "/metrics"),
              testing::Not(testing::HasSubstr("expertmesh_calls_total")));
}

}  // namespace
}  // namespace expertmesh
