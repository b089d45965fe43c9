// From start to stop: loading, health, reflection, drain, ports, flags.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
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

using ::testing::Contains;
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
  std::vector<PendingForward> running;
  for (int i = 0; i < 24; ++i) running.push_back(server->StartForward(SlowRequest(1024)));
  ASSERT_TRUE(WaitForMetric(server.get(), "expertmesh_tokens_in_flight", 1024));
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
  const char* const kOpenToAll = "may end this server's work: --allow_admin without --tls_ca";
  const auto open =
      ServerProcess::Start({.path = SiblingBinary("expertmesh-control-plane"),
                            .args = {absl::StrCat("--checkpoint=", kFixture), "--allow_admin",
                                     "--listen=0.0.0.0:0", "--metrics_listen="}});
  ASSERT_TRUE(open.ok()) << open.status();
  EXPECT_TRUE((*open)->WaitForLine("serving ", absl::Seconds(60)).ok());
  EXPECT_THAT((*open)->Stderr(), HasSubstr(kOpenToAll));

  const auto server = ServerUnderTest::Start(
      {.checkpoint = kFixture, .args = {"--allow_admin", "--local_ranks=3"}});
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(server->process().Stderr(), testing::Not(HasSubstr(kOpenToAll)));
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
  int64_t rows = 0;
  for (const v1::RankStatus& rank : status->ranks()) {
    EXPECT_EQ(rank.num_steps(), 1u);
    EXPECT_GT(rank.weight_bytes(), 0);
    rows += static_cast<int64_t>(rank.num_expert_rows());
  }
  EXPECT_EQ(rows, 4 * 2);
  EXPECT_GE(status->load_imbalance(), 1.0);
  EXPECT_GT(status->epoch_age_micros(), 0);
  EXPECT_LT(status->epoch_age_micros(), status->uptime_micros());
  EXPECT_GE(server->Metric(absl::StrCat("expertmesh_build_info{isa=\"",
                                        status->ranks(0).instruction_set(),
                                        "\",ranks=\"3\",version=\"", status->version(), "\"}")),
            1);
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

TEST(LifecycleTest, OnePortIsNeverShared) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  auto second = ServerProcess::Start(
      {.path = SiblingBinary("expertmesh-control-plane"),
       .args = {absl::StrCat("--checkpoint=", kFixture),
                "--metrics_listen=", absl::StrCat("--listen=", server->address())}});
  ASSERT_TRUE(second.ok()) << second.status();
  const auto exit_code = (*second)->Wait(absl::Minutes(1));
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 1);
  EXPECT_THAT((*second)->Stderr(), HasSubstr(absl::StrCat("cannot listen on ", server->address(),
                                                          ": Address already in use")));
  EXPECT_THAT((*second)->Stderr(), Not(HasSubstr("grpc")));
  EXPECT_EQ(server->Health(""), "SERVING");
}

// Files of a PEM pair, and of another pair's key.
class TlsFiles {
 public:
  TlsFiles() : folder_(testing::TempDir() + absl::StrCat("/tls_files_", getpid())) {
    mkdir(folder_.c_str(), 0700);
    for (const char* name : {"a", "b"}) {
      const FinishedProcess made = RunToEnd(
          {.path = "/usr/bin/openssl",
           .args = {"req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
                    "-nodes", "-subj", "/CN=localhost", "-days", "2", "-keyout",
                    Path(absl::StrCat(name, ".key")), "-out", Path(absl::StrCat(name, ".crt"))}});
      EXPECT_EQ(made.exit_code, 0) << made.err;
    }
    std::ofstream(Path("empty"));
    std::ofstream(Path("nonsense")) << "nonsense\n";
  }
  ~TlsFiles() {
    for (const char* name : {"a.key", "a.crt", "b.key", "b.crt", "empty", "nonsense"}) {
      unlink(Path(name).c_str());
    }
    rmdir(folder_.c_str());
  }
  std::string Path(const std::string& name) const { return absl::StrCat(folder_, "/", name); }

 private:
  const std::string folder_;
};

struct BadStart {
  std::vector<std::string> args;
  int exit_code;
  std::string says;
};

TEST(LifecycleTest, WhatIsWrongWithAStartIsSaid) {
  const std::string checkpoint = absl::StrCat("--checkpoint=", kFixture);
  const TlsFiles tls;
  const std::string cert_a = "--tls_cert=" + tls.Path("a.crt");
  const std::string key_a = "--tls_key=" + tls.Path("a.key");
  for (const BadStart& bad : std::vector<BadStart>{
           {{}, 2, "--checkpoint is missing"},
           {{checkpoint, "--no_such_flag=1"}, 2, "there is no flag --no_such_flag"},
           {{checkpoint, "--local_ranks=0"}, 2, "--local_ranks is 0; at least 1"},
           {{checkpoint, "--local_ranks=100000"}, 2, "--local_ranks is 100000; at most 1024"},
           {{checkpoint, "--threads=100000"}, 2, "--threads is 100000; at most 4096"},
           {{checkpoint, "--max_deadline=0"}, 2, "--max_deadline is 0; must be above 0"},
           {{checkpoint, "--step_timeout=1us"}, 2, "--step_timeout is 1us; at least 1ms"},
           {{checkpoint, "--drain_delay=-1s"}, 2, "--drain_delay is -1s; at least 0"},
           {{"--checkpoint=/no/such/folder", "--listen=127.0.0.1:99999"},
            2,
            "--listen is '127.0.0.1:99999'; expected host:port or [v6]:port, the port 0 to 65535"},
           {{checkpoint, "--listen=127.0.0.1:"}, 2, "--listen is '127.0.0.1:'"},
           {{checkpoint, "--metrics_listen=:9464"}, 2, "--metrics_listen is ':9464'"},
           {{checkpoint, "--metrics_listen=127.0.0.1:70000"}, 2, "the port 0 to 65535"},
           {{checkpoint, "--ep_size=2", "--rank_listen=10.0.0.1"}, 2, "--rank_listen is"},
           {{checkpoint, "--ep_size=2", "--rank_listen=127.0.0.1:0", cert_a, key_a},
            2,
            "--rank_listen with --tls_cert needs --tls_ca and --rank_tls_names"},
           {{checkpoint, cert_a}, 2, "--tls_cert needs --tls_key"},
           {{checkpoint, key_a}, 2, "--tls_key needs --tls_cert"},
           {{checkpoint, "--tls_ca=" + tls.Path("a.crt")}, 2, "--tls_ca needs --tls_cert"},
           {{checkpoint, key_a, "--tls_cert=" + tls.Path("nonsense")}, 2, "--tls_cert: the file"},
           {{checkpoint, cert_a, "--tls_key=" + tls.Path("nonsense")}, 2, "--tls_key: the file"},
           {{checkpoint, cert_a, "--tls_key=" + tls.Path("b.key")}, 2, "--tls_key is not the key"},
           {{checkpoint, cert_a, key_a, "--tls_ca=" + tls.Path("nonsense")}, 2, "--tls_ca: the"},
           {{checkpoint, cert_a, key_a, "--tls_ca=" + tls.Path("empty")},
            2,
            "--tls_ca: nothing in"},
           {{checkpoint, "--local_ranks=two"}, 2, "local_ranks"},
           {{checkpoint, "--isa=mmx"}, 2, "known: auto, portable"},
           {{checkpoint, "--max_message_bytes=12parsecs"}, 2, "max_message_bytes"},
           {{checkpoint, "--max_message_bytes=8GiB"},
            2,
            "--max_message_bytes is 8GiB; 4KiB to 2047MiB"},
           {{checkpoint, "--max_message_bytes=72"}, 2, "--max_message_bytes is 72; 4KiB to"},
           {{checkpoint, "--max_transport_bytes=64MiB"},
            2,
            "--max_transport_bytes is 64MiB; at least --max_message_bytes, which is 72MiB"},
           {{checkpoint, "--max_step_tokens=9999999999"}, 2, "at most 16777216"},
           {{checkpoint, "--max_rank_pairs=9999999999"}, 2, "at most 1073741824"},
           {{checkpoint, "--local_ranks=1", "--ep_size=2", "--rank_listen=127.0.0.1:0"},
            2,
            "--local_ranks would do nothing: with --ep_size all ranks are other processes"},
           {{checkpoint, "--threads=1", "--ep_size=2", "--rank_listen=127.0.0.1:0"},
            2,
            "--threads would do nothing: with --ep_size all ranks are other processes, which have "
            "a --threads of their own"},
           {{checkpoint, "--isa=avx2", "--ep_size=2", "--rank_listen=127.0.0.1:0"},
            2,
            "--isa would do nothing"},
           {{checkpoint, "--lanes=2"},
            2,
            "--lanes would do nothing: it is for ranks that are other"},
           {{checkpoint, "--heartbeat_timeout=5s"}, 2, "--heartbeat_timeout would do nothing"},
           {{checkpoint, "--rank_port_file=p"}, 2, "--rank_port_file would do nothing"},
           {{checkpoint, cert_a, key_a, "--tls_ca=" + tls.Path("a.crt"), "--rank_tls_names=*"},
            2,
            "--rank_tls_names would do nothing"},
           {{"--model=a=x", "--model_name=b"}, 2, "--model_name would do nothing: it is for"},
           {{checkpoint, "--metrics_listen=", "--metrics_top_experts=3"},
            2,
            "--metrics_top_experts would do nothing"},
           {{checkpoint, "--device=cuda:0", "--isa=avx2"}, 2, "--isa would do nothing: it is for"},
           {{checkpoint, "--log_format=xml"}, 2, "log format 'xml'"},
           {{checkpoint, "--tls_cert=/no/such/file"}, 2, "cannot read /no/such/file"},
           {{checkpoint, "extra"}, 2, "'extra' is no flag"},
           {{"--model=x"}, 2, "NAME=DIR"},
           {{"--checkpoint=/no/such/folder"}, 1, "/no/such/folder"},
           {{checkpoint, "--metrics_listen=", "--listen=203.0.113.7:1"},
            1,
            "cannot listen on 203.0.113.7:1"},
           {{checkpoint, "--metrics_listen=203.0.113.7:1"},
            1,
            "--metrics_listen: cannot listen on 203.0.113.7:1"},
           {{checkpoint, "--metrics_listen=", "--listen=no.such.host.invalid:1"},
            1,
            "--listen: cannot listen on no.such.host.invalid:1"},
           {{checkpoint, "--metrics_listen=", "--listen=nonsense"}, 2, "--listen is 'nonsense'"},
       }) {
    SCOPED_TRACE(testing::PrintToString(bad.args));
    auto process =
        ServerProcess::Start({.path = SiblingBinary("expertmesh-control-plane"), .args = bad.args});
    ASSERT_TRUE(process.ok()) << process.status();
    const auto exit_code = (*process)->Wait(absl::Minutes(2));  // a resolver takes its time
    ASSERT_TRUE(exit_code.ok()) << exit_code.status();
    EXPECT_EQ(*exit_code, bad.exit_code);
    EXPECT_THAT((*process)->Stderr(), HasSubstr(bad.says));
    if (bad.exit_code == 2) {
      const std::string text = (*process)->Stderr();
      EXPECT_THAT(text, testing::StartsWith("expertmesh-control-plane: "));
      EXPECT_THAT(text, HasSubstr("--help"));
      EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
    }
  }
}

TEST(LifecycleTest, HelpIsNoError) {
  auto process =
      ServerProcess::Start({.path = SiblingBinary("expertmesh-control-plane"), .args = {"--help"}});
  ASSERT_TRUE(process.ok()) << process.status();
  EXPECT_EQ(*(*process)->Wait(absl::Minutes(1)), 0);
  EXPECT_THAT((*process)->Stdout(), HasSubstr("--checkpoint"));
  const FinishedProcess version =
      RunToEnd({.path = SiblingBinary("expertmesh-control-plane"), .args = {"--version"}});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.out, testing::MatchesRegex("expertmesh-control-plane [0-9]+\\.[0-9.]+\n"));
}

TEST(LifecycleTest, RanksWithoutExpertsAreMentioned) {
  const auto server =
      ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--local_ranks=14"}});
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(server->process().Stderr(), HasSubstr("more ranks than a layer has experts"));
  EXPECT_THAT(server->process().Stderr(), HasSubstr("idle=2"));
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
  const CallOutcome unnamed = server->Forward(request);
  EXPECT_EQ(unnamed.code, absl::StatusCode::kInvalidArgument) << unnamed;
  EXPECT_EQ(unnamed.reason, "INVALID_FIELD");
  EXPECT_EQ(unnamed.field, "model");
  EXPECT_EQ(unnamed.message, "model is required: several are served: a, b");
  v1::ExplainRequest explain;
  *explain.mutable_request() = request;
  for (const absl::Status& status :
       {server->GetModel("").status(), server->Explain(explain).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(status.message(), HasSubstr("model is required: several are served: a, b"));
  }
  EXPECT_EQ(server->GetModel("c").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace expertmesh
