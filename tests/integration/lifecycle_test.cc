// From start to stop: loading, health, reflection, drain, ports, flags.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/bad_requests.h"
#include "tests/integration/server_under_test.h"
#include "tests/integration/sparse_checkpoint.h"

namespace expertmesh {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

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

TEST(LifecycleTest, CallsWaitWhileTheExpertsAreLoaded) {
  const SlowServer server(kLarge, {}, /*wait_until_serving=*/false);
  ASSERT_NE(server.get(), nullptr);
  EXPECT_EQ(server->Health(""), "NOT_SERVING");
  EXPECT_EQ(server->Health(kService), "NOT_SERVING");
  EXPECT_EQ(server->Health("no.such.Service"), "NOT_FOUND");
  const auto loading = server->GetModel("slow");
  ASSERT_TRUE(loading.ok()) << loading.status();
  EXPECT_FALSE(loading->ready());
  EXPECT_EQ(loading->epoch(), 0u);
  EXPECT_EQ(server->Metric("expertmesh_ready"), 0);
  PendingForward patient = server->StartForward(SlowRequest(3), absl::Minutes(2));
  const absl::Time start = absl::Now();
  const CallOutcome hasty = server->Forward(SlowRequest(3), absl::Milliseconds(200));
  EXPECT_EQ(hasty.code, absl::StatusCode::kUnavailable) << hasty;
  EXPECT_EQ(hasty.reason, "NO_EPOCH");
  EXPECT_GT(hasty.retry_after, absl::ZeroDuration());
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(100));

  ASSERT_TRUE(server->process().WaitForLine("serving slow on", absl::Minutes(2)).ok());
  const CallOutcome outcome = patient.Wait();
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
  const SlowServer server(kLarge, {}, /*wait_until_serving=*/false);
  ASSERT_NE(server.get(), nullptr);
  PendingForward waiting = server->StartForward(SlowRequest(3), absl::Minutes(2));
  EXPECT_TRUE(WaitForMetric(server.get(), "expertmesh_calls_in_flight{method=\"Forward\"}", 1));
  ASSERT_TRUE(server->process().Terminate().ok());
  const auto exit_code = server->process().Wait(absl::Seconds(30));
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 0);
  const CallOutcome outcome = waiting.Wait();
  EXPECT_EQ(outcome.code, absl::StatusCode::kUnavailable) << outcome;
  EXPECT_EQ(outcome.reason, "DRAINING");
}

TEST(LifecycleTest, DrainEndsWhatRunsAndRefusesTheRest) {
  const SlowServer server(kSlow);
  ASSERT_NE(server.get(), nullptr);
  std::vector<PendingForward> running;
  for (int i = 0; i < 3; ++i) running.push_back(server->StartForward(SlowRequest(512)));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 3 * 512));
  ASSERT_TRUE(server->process().Terminate().ok());
  ASSERT_TRUE(server->process().WaitForLine("draining", absl::Seconds(30)).ok());
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
  std::vector<PendingForward> running;
  for (int i = 0; i < 4; ++i) running.push_back(server->StartForward(SlowRequest(1024)));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 1024));
  ASSERT_TRUE(server->process().Terminate().ok());
  ASSERT_TRUE(server->process().WaitForLine("draining", absl::Seconds(30)).ok());
  ASSERT_TRUE(server->process().Signal(SIGINT).ok());
  const auto exit_code = server->process().Wait(absl::Seconds(10));
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, -SIGINT);
  for (PendingForward& call : running) call.Wait();
}

TEST(LifecycleTest, ReflectionNamesTheServices) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(server->ReflectedServices(),
              testing::IsSupersetOf({std::string(kService), std::string("grpc.health.v1.Health")}));
}

TEST(LifecycleTest, StatusForOperatorsWhereItIsAllowed) {
  const auto closed = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(closed, nullptr);
  EXPECT_EQ(closed->GetStatus().status().code(), absl::StatusCode::kUnimplemented);

  const auto server = ServerUnderTest::Start(
      {.checkpoint = kFixture, .args = {"--allow_admin", "--local_ranks=3"}});
  ASSERT_NE(server, nullptr);
  EXPECT_TRUE(server->Forward(GoodRequest({"", 1, 0, 48, 12}, 4, 2)).ok());
  const auto status = server->GetStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_TRUE(status->ready());
  EXPECT_FALSE(status->draining());
  EXPECT_EQ(status->model(), "qwen3_moe_bfloat16");
  EXPECT_EQ(status->epoch(), 1u);
  EXPECT_EQ(status->num_steps(), 1u);
  EXPECT_EQ(status->num_requests_ok(), 1u);
  EXPECT_EQ(status->queue().num_requests(), 0);
  EXPECT_EQ(status->queue().max_tokens(), 1 << 20);
  ASSERT_EQ(status->ranks_size(), 3);
  for (const v1::RankStatus& rank : status->ranks()) {
    EXPECT_EQ(rank.state(), v1::RANK_STATE_ACTIVE);
    EXPECT_EQ(rank.num_experts(), 2 * 4);
  }
  const absl::Status drain = server->Drain();
  EXPECT_EQ(drain.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(drain.message()), HasSubstr("SIGTERM"));
}

TEST(LifecycleTest, OnePortIsNeverShared) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  auto second = ServerProcess::Start(
      {.path = SiblingBinary("expertmesh-control-plane"),
       .args = {absl::StrCat("--checkpoint=", kFixture),
                "--metrics_listen=", absl::StrCat("--listen=", server->address())}});
  ASSERT_TRUE(second.ok()) << second.status();
  const auto exit_code = (*second)->Wait(absl::Seconds(30));
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 1);
  EXPECT_THAT((*second)->Stderr(), HasSubstr(absl::StrCat("cannot listen on ", server->address(),
                                                          ": Address already in use")));
  EXPECT_EQ(server->Health(""), "SERVING");
}

struct BadStart {
  std::vector<std::string> args;
  int exit_code;
  std::string says;
};

TEST(LifecycleTest, WhatIsWrongWithAStartIsSaid) {
  const std::string checkpoint = absl::StrCat("--checkpoint=", kFixture);
  for (const BadStart& bad : std::vector<BadStart>{
           {{}, 2, "--checkpoint is missing"},
           {{checkpoint, "--no_such_flag=1"}, 2, "there is no flag --no_such_flag"},
           {{checkpoint, "--local_ranks=0"}, 2, "--local_ranks is 0; at least 1"},
           {{checkpoint, "--local_ranks=two"}, 2, "local_ranks"},
           {{checkpoint, "--isa=mmx"}, 2, "known: auto, portable"},
           {{checkpoint, "--max_message_bytes=12parsecs"}, 2, "max_message_bytes"},
           {{checkpoint, "--log_format=xml"}, 2, "log format 'xml'"},
           {{checkpoint, "--tls_cert=/no/such/file"}, 2, "cannot read /no/such/file"},
           {{checkpoint, "extra"}, 2, "'extra' is no flag"},
           {{"--model=x"}, 2, "NAME=DIR"},
           {{"--checkpoint=/no/such/folder"}, 1, "/no/such/folder"},
           {{checkpoint, "--metrics_listen=", "--listen=203.0.113.7:1"},
            1,
            "cannot listen on 203.0.113.7:1"},
           {{checkpoint, "--metrics_listen=203.0.113.7:1"}, 1, "203.0.113.7:1"},
           {{checkpoint, "--metrics_listen=", "--listen=nonsense"}, 1, "nonsense"},
       }) {
    SCOPED_TRACE(testing::PrintToString(bad.args));
    auto process =
        ServerProcess::Start({.path = SiblingBinary("expertmesh-control-plane"), .args = bad.args});
    ASSERT_TRUE(process.ok()) << process.status();
    const auto exit_code = (*process)->Wait(absl::Seconds(30));
    ASSERT_TRUE(exit_code.ok()) << exit_code.status();
    EXPECT_EQ(*exit_code, bad.exit_code);
    EXPECT_THAT((*process)->Stderr(), HasSubstr(bad.says));
    if (bad.exit_code == 2) {
      EXPECT_THAT((*process)->Stderr(), HasSubstr("usage: "));
    }
  }
}

TEST(LifecycleTest, HelpIsNoError) {
  auto process =
      ServerProcess::Start({.path = SiblingBinary("expertmesh-control-plane"), .args = {"--help"}});
  ASSERT_TRUE(process.ok()) << process.status();
  EXPECT_EQ(*(*process)->Wait(absl::Seconds(30)), 0);
  EXPECT_THAT((*process)->Stdout(), HasSubstr("--checkpoint"));
}

TEST(LifecycleTest, TwoModelsInOneProcess) {
  const auto server = ServerUnderTest::Start(
      {.checkpoint = kFixture,
       .args = {"--model_name=b", "--model=a=tests/golden/mixtral_float32", "--log_format=json"}});
  ASSERT_NE(server, nullptr);
  const auto models = server->ListModels();
  ASSERT_TRUE(models.ok()) << models.status();
  ASSERT_EQ(models->models_size(), 2);
  EXPECT_EQ(models->models(0).model(), "a");
  EXPECT_EQ(models->models(1).model(), "b");
  v1::ForwardRequest request = GoodRequest({"b", 1, 0, 48, 12}, 4, 2);
  EXPECT_TRUE(server->Forward(request).ok());
  request.set_layer(0);
  request.set_model("a");
  for (int i = 0; i < request.topk().ids_size(); ++i) request.mutable_topk()->set_ids(i, i % 4);
  const CallOutcome outcome = server->Forward(request);
  EXPECT_TRUE(outcome.ok()) << outcome;
  request.clear_model();
  EXPECT_EQ(server->Forward(request).reason, "MODEL_NOT_FOUND");
}

}  // namespace
}  // namespace expertmesh
