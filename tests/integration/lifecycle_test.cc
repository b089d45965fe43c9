// From loading to the end: who waits, who is answered, who is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/steady_now.h"
#include "tests/integration/bad_requests.h"
#include "tests/integration/server_under_test.h"
#include "tests/integration/sparse_checkpoint.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kService[] = "expertmesh.v1.ExpertService";
constexpr char kFixture[] = "tests/golden/qwen3_moe_bfloat16";

// Some 130 GFLOP for 1024 tokens of top-4.
const SparseCheckpointShape kSlow;
// A gigabyte: a third of a second and more of loading, however fast the machine.
const SparseCheckpointShape kLarge = {.intermediate_size = 2720, .num_experts = 32};

// Serves a sparse checkpoint as "slow".
class SlowServer {
 public:
  explicit SlowServer(const SparseCheckpointShape& shape, std::vector<std::string> args = {},
                      bool wait_until_serving = true)
      : checkpoint_(shape) {
    args.push_back("--model_name=slow");
    args.push_back("--local_ranks=2");
    args.push_back("--threads=1");  // equally slow on large machines
    server_ = ServerUnderTest::Start(
        {.checkpoint = checkpoint_.path(), .args = args, .wait_until_serving = wait_until_serving});
  }
  ServerUnderTest* get() const { return server_.get(); }
  ServerUnderTest* operator->() const { return server_.get(); }

 private:
  SparseCheckpoint checkpoint_;
  std::unique_ptr<ServerUnderTest> server_;
};

v1::ForwardRequest SlowRequest(int64_t num_tokens) {
  return GoodRequest({"slow", 0, 1, kSlow.hidden_size, kSlow.num_experts}, num_tokens, 4);
}

// Until `series` is at least `value`.
bool WaitForMetric(ServerUnderTest* server, const std::string& series, double value) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (absl::Now() < deadline) {
    if (server->Metric(series) >= value) return true;
  }
  return false;
}

// The first ones may be taken for repeats.
int SignalUntilItEnds(ServerProcess* process) {
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  while (absl::Now() < deadline) {
    process->Signal(SIGINT).IgnoreError();
    const auto exit_code = process->Wait(absl::Milliseconds(100));
    if (exit_code.ok()) return *exit_code;
  }
  return 0;
}

// What a server says that has not loaded yet.
struct WhileLoading {
  std::string health, service_health, other_health;
  absl::StatusOr<v1::GetModelResponse> model;
  double ready = -1;
  CallOutcome hasty;
  absl::Duration hasty_took;
};
WhileLoading AskWhileLoading(ServerUnderTest& server, absl::Duration hasty_timeout) {
  WhileLoading said;
  said.health = server.Health("");
  said.service_health = server.Health(kService);
  said.other_health = server.Health("no.such.Service");
  said.model = server.GetModel("slow");
  said.ready = server.Metric("expertmesh_ready");
  const absl::Time start = absl::Now();
  said.hasty = server.Forward(SlowRequest(3), hasty_timeout);
  said.hasty_took = absl::Now() - start;
  return said;
}

TEST(LifecycleTest, CallsWaitWhileTheExpertsAreLoaded) {
  std::unique_ptr<SlowServer> slow;
  std::optional<PendingForward> patient;
  WhileLoading said;
  absl::Duration timeout = absl::Milliseconds(200);
  // On a busy machine it may have loaded before it was asked, or the hasty call's own deadline come
  // before the answer that precedes it.
  for (int attempt = 0; attempt < 5; ++attempt) {
    if (patient.has_value()) {
      ASSERT_TRUE(slow->get()->process().Kill().ok());
      patient->Wait();
    }
    slow = std::make_unique<SlowServer>(kLarge, std::vector<std::string>{"--max_deadline=5m"},
                                        /*wait_until_serving=*/false);
    ASSERT_NE(slow->get(), nullptr);
    patient = slow->get()->StartForward(SlowRequest(3), absl::Minutes(5));
    said = AskWhileLoading(*slow->get(), timeout);
    if (said.hasty.code == absl::StatusCode::kDeadlineExceeded) timeout *= 2;
    if (said.hasty.code == absl::StatusCode::kUnavailable) break;
  }
  ServerUnderTest* const server = slow->get();
  EXPECT_EQ(said.health, "NOT_SERVING");
  EXPECT_EQ(said.service_health, "NOT_SERVING");
  EXPECT_EQ(said.other_health, "NOT_FOUND");
  ASSERT_TRUE(said.model.ok()) << said.model.status();
  EXPECT_FALSE(said.model->ready());
  EXPECT_EQ(said.model->epoch(), 0u);
  EXPECT_EQ(said.ready, 0);
  EXPECT_EQ(said.hasty.code, absl::StatusCode::kUnavailable) << said.hasty;
  EXPECT_EQ(said.hasty.reason, "NO_EPOCH");
  EXPECT_GT(said.hasty.retry_after, absl::ZeroDuration());
  EXPECT_GE(said.hasty_took, absl::Milliseconds(100));

  ASSERT_TRUE(server->process().WaitForLine("serving slow on", absl::Minutes(2)).ok());
  const CallOutcome outcome = patient->Wait();
  ASSERT_TRUE(outcome.ok()) << outcome;
  for (const double value : OutputValues(outcome.response.output())) ASSERT_EQ(value, 0.0);
  EXPECT_EQ(server->Health(""), "SERVING");
  EXPECT_EQ(server->Health(kService), "SERVING");
  EXPECT_TRUE(server->GetModel("slow")->ready());
  EXPECT_EQ(server->Metric("expertmesh_ready"), 1);
  EXPECT_THAT(server->process().Stderr(), HasSubstr("of memory"));

  // The checkpoint has no gate.
  v1::ForwardRequest by_gate = SlowRequest(3);
  by_gate.mutable_server_gate();
  const CallOutcome no_gate = server->Forward(by_gate);
  EXPECT_EQ(no_gate.code, absl::StatusCode::kFailedPrecondition) << no_gate;
  EXPECT_EQ(no_gate.reason, "NO_GATE_WEIGHTS");
}

TEST(LifecycleTest, StopWhileLoading) {
  CallOutcome outcome;
  outcome.code = absl::StatusCode::kOk;
  // On a busy machine it may have loaded, and answered, before it is stopped.
  for (int attempt = 0; attempt < 5 && outcome.ok(); ++attempt) {
    const SlowServer server(kLarge, {}, /*wait_until_serving=*/false);
    ASSERT_NE(server.get(), nullptr);
    PendingForward waiting = server->StartForward(SlowRequest(3), absl::Minutes(2));
    EXPECT_TRUE(WaitForMetric(server.get(), "expertmesh_calls_in_flight{method=\"Forward\"}", 1) ||
                waiting.IsDone());
    ASSERT_TRUE(server->process().Terminate().ok());
    const auto exit_code = server->process().Wait(absl::Minutes(1));
    ASSERT_TRUE(exit_code.ok()) << exit_code.status();
    EXPECT_EQ(*exit_code, 0);
    outcome = waiting.Wait();
  }
  EXPECT_EQ(outcome.code, absl::StatusCode::kUnavailable) << outcome;
  EXPECT_EQ(outcome.reason, "DRAINING");
}

// Whatever comes too late is UNAVAILABLE, which clients may send again elsewhere. No client here
// goes on once its connection is gone.
TEST(LifecycleTest, CallsInTheLastMomentsAreNotCancelled) {
  for (int attempt = 0; attempt < 3; ++attempt) {
    const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
    ASSERT_NE(server, nullptr);
    const v1::ForwardRequest request = GoodRequest({"", 1, 0, 48, 12}, 4, 2);
    std::mutex mutex;
    std::map<std::string, int> ends;
    std::atomic<int> num_answered{0};
    std::vector<std::thread> clients;
    for (int client = 0; client < 8; ++client) {
      clients.emplace_back([&, client] {
        std::string end;
        while (end.empty()) {
          if (client % 2 == 0) {
            const CallOutcome outcome = server->Forward(request);
            if (!outcome.ok() && outcome.reason != "DRAINING") {
              end = absl::StrCat(absl::StatusCodeToString(outcome.code));
            }
          } else {
            const absl::Status status = server->GetModel("").status();
            if (!status.ok()) end = absl::StatusCodeToString(status.code());
          }
          ++num_answered;
        }
        const std::lock_guard<std::mutex> lock(mutex);
        ++ends[end];
      });
    }
    const absl::Time deadline = SteadyNow() + absl::Minutes(1);
    while (num_answered < 200 && SteadyNow() < deadline) std::this_thread::yield();
    const int num_answered_by_then = num_answered;
    EXPECT_TRUE(server->process().Terminate().ok());
    for (std::thread& client : clients) client.join();
    ASSERT_GE(num_answered_by_then, 200);
    EXPECT_EQ(ends, (std::map<std::string, int>{{"UNAVAILABLE", 8}}));
    const auto exit_code = server->process().Wait(absl::Minutes(1));
    ASSERT_TRUE(exit_code.ok()) << exit_code.status();
    EXPECT_EQ(*exit_code, 0);
  }
}

TEST(LifecycleTest, DrainEndsWhatRunsAndRefusesTheRest) {
  const SlowServer server(kSlow);
  ASSERT_NE(server.get(), nullptr);
  std::vector<PendingForward> running;
  for (int i = 0; i < 3; ++i) running.push_back(server->StartForward(SlowRequest(512)));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 3 * 512));
  ASSERT_TRUE(server->process().Terminate().ok());
  ASSERT_TRUE(server->process().WaitForLine("draining", absl::Minutes(1)).ok());
  const CallOutcome late = server->Forward(SlowRequest(3));
  EXPECT_EQ(late.code, absl::StatusCode::kUnavailable) << late;
  EXPECT_EQ(late.reason, "DRAINING");
  EXPECT_GT(late.retry_after, absl::ZeroDuration());
  EXPECT_EQ(server->Health(""), "NOT_SERVING");
  EXPECT_EQ(server->Health(kService), "NOT_SERVING");
  EXPECT_FALSE(server->GetModel("slow")->ready());
  for (PendingForward& call : running) {
    const CallOutcome outcome = call.Wait();
    EXPECT_TRUE(outcome.ok()) << outcome;
  }
  const auto exit_code = server->process().Wait(absl::Seconds(60));
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 0);
}

TEST(LifecycleTest, DrainIsBounded) {
  const SlowServer server(kSlow, {"--drain_timeout=50ms"});
  ASSERT_NE(server.get(), nullptr);
  std::vector<PendingForward> running;
  for (int i = 0; i < 4; ++i) running.push_back(server->StartForward(SlowRequest(512)));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 4 * 512));
  ASSERT_TRUE(server->process().Terminate().ok());
  const auto exit_code = server->process().Wait(absl::Seconds(120));
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 0);
  int num_refused = 0;
  for (PendingForward& call : running) {
    const CallOutcome outcome = call.Wait();
    if (outcome.ok()) continue;
    ++num_refused;
    EXPECT_EQ(outcome.code, absl::StatusCode::kUnavailable) << outcome;
    EXPECT_EQ(outcome.reason, "DRAINING");
  }
  EXPECT_GT(num_refused, 0);
}

TEST(LifecycleTest, ASecondSignalEndsAtOnce) {
  const SlowServer server(kSlow);
  ASSERT_NE(server.get(), nullptr);
  // More than can be done within the second in which a signal counts as the first one's repeat, and
  // made faster than it is done; of what has not come by then a drain refuses all.
  const v1::ForwardRequest request = SlowRequest(2048);
  std::vector<PendingForward> running;
  for (int i = 0; i < 24; ++i) running.push_back(server->StartForward(request));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 12 * 2048));
  ASSERT_TRUE(server->process().Terminate().ok());
  ASSERT_TRUE(server->process().WaitForLine("draining", absl::Minutes(1)).ok());
  EXPECT_EQ(SignalUntilItEnds(&server->process()), -SIGINT);
  EXPECT_THAT(server->process().Stderr(), HasSubstr("ending at once; open calls are lost"));
  for (PendingForward& call : running) call.Wait();
}

TEST(LifecycleTest, ASecondSignalLosesNothingWhereNothingIsInFlight) {
  const auto server =
      ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--drain_delay=2m"}});
  ASSERT_NE(server, nullptr);
  ASSERT_TRUE(server->process().Terminate().ok());
  EXPECT_EQ(SignalUntilItEnds(&server->process()), -SIGINT);
  EXPECT_THAT(server->process().Stderr(), HasSubstr("ending at once"));
  EXPECT_THAT(server->process().Stderr(), Not(HasSubstr("are lost")));
}

// As timeout(1) does, which signals a process and then its group.
TEST(LifecycleTest, ASignalThatComesTwiceAtOnceIsOne) {
  const SlowServer server(kSlow);
  ASSERT_NE(server.get(), nullptr);
  PendingForward running = server->StartForward(SlowRequest(512));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 512));
  // Not the same number twice, which the kernel may deliver as one; stopped, so that they do come
  // at once, however busy the machine is.
  ASSERT_TRUE(server->process().Signal(SIGSTOP).ok());
  ASSERT_TRUE(server->process().Terminate().ok());
  ASSERT_TRUE(server->process().Signal(SIGINT).ok());
  ASSERT_TRUE(server->process().Signal(SIGCONT).ok());
  const CallOutcome outcome = running.Wait();
  EXPECT_TRUE(outcome.ok()) << outcome;
  const auto exit_code = server->process().Wait(absl::Seconds(60));
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 0);
}

TEST(LifecycleTest, DrainByRpcLeavesTheProcessForSigterm) {
  const SlowServer server(kSlow, {"--allow_admin"});
  ASSERT_NE(server.get(), nullptr);
  EXPECT_EQ(server->Drain(absl::Microseconds(-1)).status().code(),
            absl::StatusCode::kInvalidArgument);
  PendingForward running = server->StartForward(SlowRequest(512));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 512));
  const auto drained = server->Drain(absl::ZeroDuration());
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_TRUE(drained->complete());
  EXPECT_EQ(drained->num_requests_left(), 0);
  const CallOutcome outcome = running.Wait();
  EXPECT_TRUE(outcome.ok()) << outcome;
  EXPECT_EQ(server->Forward(SlowRequest(3)).reason, "DRAINING");
  EXPECT_EQ(server->Health(""), "NOT_SERVING");
  const auto status = server->GetStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_TRUE(status->draining());
  EXPECT_THAT(status->detail(), HasSubstr("as AdminService.Drain asked"));
  EXPECT_THAT(status->detail(), HasSubstr("SIGTERM ends this process"));
  EXPECT_TRUE(server->Drain(absl::ZeroDuration())->complete());
  ASSERT_TRUE(server->process().Terminate().ok());
  const auto exit_code = server->process().Wait(absl::Minutes(1));
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 0);
}

TEST(LifecycleTest, DrainByRpcIsBounded) {
  const SlowServer server(kSlow, {"--allow_admin"});
  ASSERT_NE(server.get(), nullptr);
  std::vector<PendingForward> running;
  for (int i = 0; i < 3; ++i) running.push_back(server->StartForward(SlowRequest(1024)));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 3 * 1024));
  const auto drained = server->Drain(absl::Milliseconds(1));
  ASSERT_TRUE(drained.ok()) << drained.status();
  EXPECT_FALSE(drained->complete());
  EXPECT_GT(drained->num_requests_left(), 0);
  int64_t num_refused = 0;
  for (PendingForward& call : running) num_refused += call.Wait().reason == "DRAINING";
  EXPECT_EQ(num_refused, drained->num_requests_left());
}

// An idle server, and a prober that comes with a new connection each time.
TEST(LifecycleTest, ADrainDelayShowsNewConnectionsThatTheServerLeaves) {
  const auto server =
      ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--drain_delay=5s"}});
  ASSERT_NE(server, nullptr);
  ASSERT_TRUE(server->process().Terminate().ok());
  ASSERT_TRUE(server->process().WaitForLine("draining", absl::Minutes(1)).ok());
  EXPECT_EQ(server->HealthOverNewConnection(), "NOT_SERVING");
  EXPECT_EQ(server->Forward(GoodRequest({"", 1, 0, 48, 12}, 4, 2)).reason, "DRAINING");
  const auto exit_code = server->process().Wait(absl::Seconds(60));
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 0);
}

}  // namespace
}  // namespace expertmesh
