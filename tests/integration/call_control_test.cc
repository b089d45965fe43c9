// Deadlines, cancellation, sizes: what ends a call other than its answer.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/bad_requests.h"
#include "tests/integration/server_under_test.h"
#include "tests/integration/sparse_checkpoint.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

constexpr char kFixture[] = "tests/golden/qwen3_moe_bfloat16";
constexpr char kInFlight[] = "expertmesh_calls_in_flight{method=\"Forward\"}";

std::string CallsSeries(const std::string& code) {
  return absl::StrCat("expertmesh_calls_total{code=\"", code, "\",method=\"Forward\"}");
}

RequestTarget FixtureTarget() { return {"qwen3_moe_bfloat16", 1, 0, 48, 12}; }

// Until `series` is `value`.
bool WaitForMetric(ServerUnderTest* server, const std::string& series, double value) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (absl::Now() < deadline) {
    if (server->Metric(series) == value) return true;
  }
  return false;
}

class SlowModelTest : public testing::Test {
 protected:
  SlowModelTest() : checkpoint_(SparseCheckpointShape{.intermediate_size = 1360 / kSlowdown}) {}

  std::unique_ptr<ServerUnderTest> StartServer(std::vector<std::string> args) {
    args.push_back("--model_name=slow");
    args.push_back("--threads=1");  // equally slow on large machines
    return ServerUnderTest::Start({.checkpoint = checkpoint_.path(), .args = args});
  }

  // Long enough to be found running: 67 MFLOP a token, or a tenth under a sanitizer.
  v1::ForwardRequest Request(int64_t num_tokens) const {
    return GoodRequest(
        {"slow", 0, 1, checkpoint_.shape().hidden_size, checkpoint_.shape().num_experts},
        num_tokens, 4);
  }

  SparseCheckpoint checkpoint_;
};

TEST_F(SlowModelTest, ACallWithoutDeadlineGetsTheServersOwn) {
  const auto server = StartServer({"--max_deadline=50ms"});
  ASSERT_NE(server, nullptr);
  EXPECT_EQ(server->GetModel("")->limits().max_deadline_micros(), 50'000);
  const CallOutcome outcome = server->Forward(Request(2048), absl::InfiniteDuration());
  EXPECT_EQ(outcome.code, absl::StatusCode::kDeadlineExceeded) << outcome;
  EXPECT_EQ(outcome.reason, "DEADLINE_PASSED");
  // A longer one of the client's does not stretch it.
  const CallOutcome longer = server->Forward(Request(2048), absl::Minutes(2));
  EXPECT_EQ(longer.code, absl::StatusCode::kDeadlineExceeded) << longer;
  EXPECT_EQ(longer.reason, "DEADLINE_PASSED");
  EXPECT_EQ(longer.message, "the server's --max_deadline of 50ms passed");
  EXPECT_EQ(longer.limit, "50ms");
  // The step runs to its end, and its buffers come back.
  EXPECT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 0));
  EXPECT_EQ(server->Metric(kInFlight), 0);
}

TEST_F(SlowModelTest, CancelledWhileRunningAndWhileQueued) {
  const auto server = StartServer({});
  ASSERT_NE(server, nullptr);
  PendingForward running = server->StartForward(Request(2048));
  ASSERT_TRUE(WaitForMetric(server.get(), kInFlight, 1));
  PendingForward queued = server->StartForward(Request(2048));
  PendingForward kept = server->StartForward(Request(16));
  ASSERT_TRUE(WaitForMetric(server.get(), kInFlight, 3));
  queued.Cancel();
  EXPECT_EQ(queued.Wait().code, absl::StatusCode::kCancelled);
  running.Cancel();
  EXPECT_EQ(running.Wait().code, absl::StatusCode::kCancelled);
  const CallOutcome outcome = kept.Wait();
  EXPECT_TRUE(outcome.ok()) << outcome;
  EXPECT_TRUE(WaitForMetric(server.get(), CallsSeries("CANCELLED"), 2));
  EXPECT_TRUE(WaitForMetric(server.get(), kInFlight, 0));
  EXPECT_TRUE(WaitForMetric(server.get(), "expertmesh_bytes_in_flight", 0));
}

TEST_F(SlowModelTest, TooMuchAtOnceIsRefusedWithAdvice) {
  const auto server = StartServer({"--max_inflight_tokens=3000"});
  ASSERT_NE(server, nullptr);
  PendingForward first = server->StartForward(Request(2000));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 2000));
  const CallOutcome refused = server->Forward(Request(1500));
  EXPECT_EQ(refused.code, absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(refused.reason, "QUEUE_FULL");
  EXPECT_GT(refused.retry_after, absl::ZeroDuration());
  const CallOutcome outcome = first.Wait();
  EXPECT_TRUE(outcome.ok()) << outcome;
}

TEST(CallControlTest, DeadlinesOfAMillisecondHarmNobody) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--local_ranks=2"}});
  ASSERT_NE(server, nullptr);
  const v1::ForwardRequest request = GoodRequest(FixtureTarget(), 64, 4);
  const CallOutcome expected = server->Forward(request);
  ASSERT_TRUE(expected.ok()) << expected;
  for (int i = 0; i < 200; ++i) {
    const CallOutcome outcome =
        server->Forward(request, i % 2 == 0 ? absl::Milliseconds(1) : absl::Seconds(30));
    if (outcome.ok()) {
      ASSERT_EQ(outcome.response.output().data(), expected.response.output().data());
    } else {
      ASSERT_EQ(outcome.code, absl::StatusCode::kDeadlineExceeded) << outcome;
      ASSERT_EQ(i % 2, 0);
    }
  }
  EXPECT_TRUE(WaitForMetric(server.get(), kInFlight, 0));
  EXPECT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 0));
}

// 64 MiB of hidden states, split over many steps, give the bytes of the same tokens sent few at a
// time.
TEST(CallControlTest, SixtyFourMebibytes) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--local_ranks=2"}});
  ASSERT_NE(server, nullptr);
  const int64_t row_bytes = 2 * FixtureTarget().hidden_size;
  const int64_t piece = 12 * 64;  // GoodRequest repeats after 12 rows of ids, 128 elements
  const int64_t num_pieces = (int64_t{64} << 20) / row_bytes / piece;
  const int64_t num_tokens = piece * num_pieces + 1;
  const v1::ForwardRequest few = GoodRequest(FixtureTarget(), piece, 1);
  const CallOutcome expected = server->Forward(few);
  ASSERT_TRUE(expected.ok()) << expected;

  v1::ForwardRequest many = few;
  many.mutable_hidden_states()->set_shape(0, num_tokens);
  std::string* data = many.mutable_hidden_states()->mutable_data();
  for (int64_t i = 1; i < num_pieces; ++i) {
    data->append(few.hidden_states().data());
    many.mutable_topk()->mutable_ids()->MergeFrom(few.topk().ids());
    many.mutable_topk()->mutable_weights()->MergeFrom(few.topk().weights());
  }
  data->append(few.hidden_states().data(), 0, static_cast<size_t>(row_bytes));
  many.mutable_topk()->add_ids(few.topk().ids(0));
  many.mutable_topk()->add_weights(few.topk().weights(0));
  ASSERT_GE(many.ByteSizeLong(), size_t{64} << 20);
  constexpr char kCopied[] = "expertmesh_payload_bytes_copied_total";
  const double copied_before = server->Metric(kCopied);
  const CallOutcome outcome = server->Forward(many, absl::Seconds(59));
  ASSERT_TRUE(outcome.ok()) << outcome;
  EXPECT_EQ(server->Metric(kCopied) - copied_before,
            static_cast<double>(many.hidden_states().data().size()) + 4.0 * many.topk().ids_size() +
                4.0 * many.topk().weights_size());
  EXPECT_GT(outcome.response.served_by().num_steps(), 50);
  const v1::Timings& timings = outcome.response.timings();
  EXPECT_GT(timings.compute_micros(), 0);
  EXPECT_LE(timings.queue_micros() + timings.route_micros() + timings.plan_micros() +
                timings.dispatch_micros() + timings.compute_micros() + timings.combine_micros(),
            timings.total_micros())
      << timings.ShortDebugString();
  const std::string& output = outcome.response.output().data();
  ASSERT_EQ(static_cast<int64_t>(output.size()), num_tokens * row_bytes);
  const std::string& unit = expected.response.output().data();
  for (size_t i = 0; i < output.size(); i += unit.size()) {
    const size_t size = std::min(unit.size(), output.size() - i);
    ASSERT_EQ(output.compare(i, size, unit, 0, size), 0) << "from byte " << i;
  }
}

TEST(CallControlTest, AMessageOverTheLimitIsRefusedAndNamesIt) {
  const auto server =
      ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--max_message_bytes=1MiB"}});
  ASSERT_NE(server, nullptr);
  EXPECT_EQ(server->GetModel("")->limits().max_request_bytes(), 1 << 20);
  const CallOutcome outcome = server->Forward(GoodRequest(FixtureTarget(), 12'000, 2));
  EXPECT_EQ(outcome.code, absl::StatusCode::kResourceExhausted) << outcome;
  EXPECT_THAT(outcome.message, HasSubstr("1048576"));
  EXPECT_TRUE(server->Forward(GoodRequest(FixtureTarget(), 9'000, 2)).ok());
}

TEST(CallControlTest, OptionsThatLeaveThingsOut) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--local_ranks=2"}});
  ASSERT_NE(server, nullptr);
  v1::ForwardRequest request = GoodRequest(FixtureTarget(), 8, 2);
  request.mutable_topk()->set_ids(2, -1);
  request.mutable_topk()->set_ids(3, -1);
  request.mutable_options()->set_stats_only(true);
  const CallOutcome stats = server->Forward(request);
  ASSERT_TRUE(stats.ok()) << stats;
  EXPECT_FALSE(stats.response.has_output());
  EXPECT_EQ(stats.response.request_id(), "good");
  EXPECT_EQ(stats.response.stats().num_tokens(), 8);
  EXPECT_EQ(stats.response.stats().num_pairs(), 14);
  EXPECT_EQ(stats.response.stats().num_tokens_without_expert(), 1);
  EXPECT_EQ(stats.response.stats().tokens_per_expert_size(), FixtureTarget().num_experts);
  // Ids by token: 0 5 | - - | 8 1 | 6 11 and, on rank 1, 4 9 | 2 7 | 0 5 | 10 3. Rank 0 owns 0
  // to 5.
  EXPECT_THAT(stats.response.stats().rows_per_rank(), testing::ElementsAre(8, 6));
  // Tokens 2 and 3 go to rank 1, tokens 4 to 7 to rank 0.
  EXPECT_EQ(stats.response.stats().dispatch_bytes(), 6 * 48 * 2);
  EXPECT_EQ(stats.response.stats().combine_bytes(), 6 * 48 * 2);
  EXPECT_EQ(stats.response.served_by().num_steps(), 1);
  EXPECT_EQ(stats.response.served_by().ep_size(), 2);
  EXPECT_EQ(stats.response.served_by().strategy(), v1::DISPATCH_MODE_ALL_TO_ALL);
  EXPECT_GT(stats.response.timings().total_micros(), 0);

  request.mutable_options()->set_stats_only(false);
  request.mutable_options()->set_validate_only(true);
  const CallOutcome validated = server->Forward(request);
  ASSERT_TRUE(validated.ok()) << validated;
  EXPECT_FALSE(validated.response.has_output());
  EXPECT_FALSE(validated.response.has_stats());
  EXPECT_EQ(validated.response.served_by().num_steps(), 0);
  EXPECT_EQ(server->Metric("expertmesh_steps_total"), 1);
  v1::Tensor* logits = request.mutable_router_logits();
  logits->add_shape(8);
  logits->add_shape(FixtureTarget().num_experts);
  for (int i = 0; i < 8 * FixtureTarget().num_experts; ++i) {
    logits->add_values(i == 50 ? std::nanf("") : 1.0f);
  }
  EXPECT_THAT(server->Forward(request).field, testing::StartsWith("router_logits"));
  logits->set_values(50, 1.0f);
  EXPECT_TRUE(server->Forward(request).ok());
}

TEST(CallControlTest, ARequestWithoutAnIdGetsOne) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  v1::ForwardRequest request = GoodRequest(FixtureTarget(), 1, 1);
  request.clear_request_id();
  const std::string first = server->Forward(request).response.request_id();
  const std::string second = server->Forward(request).response.request_id();
  EXPECT_NE(first, "");
  EXPECT_NE(first, second);
}

TEST(CallControlTest, DispatchIsForDebuggingAndChangesNoByte) {
  const auto server = ServerUnderTest::Start(
      {.checkpoint = kFixture, .args = {"--local_ranks=1", "--allow_dispatch_option"}});
  ASSERT_NE(server, nullptr);
  v1::ForwardRequest request = GoodRequest(FixtureTarget(), 33, 4);
  request.mutable_options()->set_dispatch(v1::DISPATCH_MODE_PASSTHROUGH);
  const CallOutcome passthrough = server->Forward(request);
  ASSERT_TRUE(passthrough.ok()) << passthrough;
  EXPECT_EQ(passthrough.response.served_by().strategy(), v1::DISPATCH_MODE_PASSTHROUGH);
  request.mutable_options()->set_dispatch(v1::DISPATCH_MODE_ALL_TO_ALL);
  const CallOutcome all_to_all = server->Forward(request);
  ASSERT_TRUE(all_to_all.ok()) << all_to_all;
  EXPECT_EQ(all_to_all.response.served_by().strategy(), v1::DISPATCH_MODE_ALL_TO_ALL);
  EXPECT_EQ(all_to_all.response.output().data(), passthrough.response.output().data());
}

}  // namespace
}  // namespace expertmesh
