// `expertmesh bench` as a process, against servers that are overloaded, stopped or gone: its
// figures say so, it ends, and its exit code tells scripts.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/process_usage.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kFixture[] = "tests/golden/qwen3_moe_bfloat16";
constexpr absl::Duration kPatience = absl::Minutes(1);

std::unique_ptr<ServerProcess> StartBench(const ServerUnderTest& server,
                                          std::vector<std::string> args) {
  args.insert(args.begin(), {"bench", absl::StrCat("--target=", server.address()), "--requests=8"});
  auto bench = ServerProcess::Start({.path = SiblingBinary("expertmesh"), .args = args});
  EXPECT_TRUE(bench.ok()) << bench.status();
  return *std::move(bench);
}

// Its exit code; -1000 when it does not end.
int ExitCode(ServerProcess* process) { return process->Wait(kPatience).value_or(-1000); }

bool AwaitAnswers(ServerUnderTest* server, double num_calls) {
  const absl::Time deadline = absl::Now() + kPatience;
  while (absl::Now() < deadline) {
    if (server->Metric("expertmesh_calls_total{code=\"OK\",method=\"Forward\"}") >= num_calls) {
      return true;
    }
  }
  return false;
}

TEST(BenchProcessTest, AnOverloadedServersRefusalsAreCounted) {
  const auto server = ServerUnderTest::Start(
      {.checkpoint = kFixture, .args = {"--max_inflight_tokens=1024", "--threads=1"}});
  ASSERT_NE(server, nullptr);
  const auto bench = StartBench(*server, {"--json", "--warmup=0s", "--duration=1s", "--tokens=1000",
                                          "--concurrency=64", "--max_attempts=1"});
  EXPECT_EQ(ExitCode(bench.get()), 0);
  const json result = json::parse(bench->Stdout());
  EXPECT_GT(result["calls_ok"], 0);
  EXPECT_GT(result["errors"]["RESOURCE_EXHAUSTED"], 0);
  EXPECT_EQ(result["errors"].size(), 1u) << result;
  EXPECT_EQ(result["verified"]["different_bytes"], 0);
  // Answers counted by both sides: what is not in the bench's figures is its verification and what
  // was in flight at the end.
  const double served = server->Metric("expertmesh_calls_total{code=\"OK\",method=\"Forward\"}");
  EXPECT_GE(served, result["calls_ok"]);
  EXPECT_LE(served, result["calls_ok"].get<double>() + 64 + 8);
}

TEST(BenchProcessTest, AllRefusedIsAnErrorThatSaysWhy) {
  const auto server =
      ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--max_inflight_tokens=10"}});
  ASSERT_NE(server, nullptr);
  const auto bench = StartBench(*server, {"--warmup=0s", "--duration=300ms", "--tokens=11"});
  EXPECT_EQ(ExitCode(bench.get()), 1);
  EXPECT_THAT(bench->Stdout(), HasSubstr("0 calls answered"));
  EXPECT_THAT(bench->Stdout(), Not(HasSubstr("p50"))) << "of nothing";
  EXPECT_THAT(bench->Stderr(), HasSubstr("no call was answered: "));
  EXPECT_THAT(bench->Stderr(), HasSubstr("is 11; expected 0 to 10"));
  EXPECT_THAT(bench->Stderr(), HasSubstr("limit: 0 to 10"));
}

TEST(BenchProcessTest, AServerThatIsKilledInTheMiddle) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  const auto bench = StartBench(
      *server, {"--json", "--warmup=0s", "--duration=1h", "--timeout=30s", "--max_attempts=1"});
  ASSERT_TRUE(AwaitAnswers(server.get(), 20));
  ASSERT_TRUE(server->process().Kill().ok());
  ASSERT_TRUE(bench->WaitForLine("first error: UNAVAILABLE", kPatience).ok());
  ASSERT_TRUE(bench->Signal(SIGINT).ok());
  EXPECT_EQ(ExitCode(bench.get()), 1);
  const json result = json::parse(bench->Stdout());
  EXPECT_GT(result["calls_ok"], 0);
  ASSERT_TRUE(result["errors"].contains("UNAVAILABLE")) << result;
  EXPECT_GT(result["errors"]["UNAVAILABLE"], 0) << result;
  // 8 slots that pause 20 ms, 40 ms, ... 1 s fail 7 times each in their first second and once a
  // second from then on, not thousands of times.
  EXPECT_LE(result["errors"]["UNAVAILABLE"].get<double>(),
            8 * (8 + result["seconds"].get<double>()))
      << result;
  EXPECT_EQ(result["verified"], nullptr);
  EXPECT_THAT(bench->Stderr(), HasSubstr("is the server up"));
}

// gRPC ends calls that reach a server while it shuts down with a bare CANCELLED.
TEST(BenchProcessTest, AServerThatIsStoppedInTheMiddleIsUnavailableAndNothingElse) {
  for (int round = 0; round < 6; ++round) {
    SCOPED_TRACE(round);
    const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
    ASSERT_NE(server, nullptr);
    const auto bench = StartBench(
        *server, {"--json", "--warmup=0s", "--duration=1h", "--timeout=30s", "--max_attempts=1"});
    ASSERT_TRUE(AwaitAnswers(server.get(), 20));
    ASSERT_TRUE(server->process().Terminate().ok());
    ASSERT_TRUE(server->process().Wait(kPatience).ok());
    ASSERT_TRUE(bench->WaitForLine("first error: ", kPatience).ok());
    ASSERT_TRUE(bench->Signal(SIGINT).ok());
    EXPECT_EQ(ExitCode(bench.get()), 1);
    const json result = json::parse(bench->Stdout());
    EXPECT_FALSE(result["errors"].empty()) << result;
    for (const auto& [code, count] : result["errors"].items()) {
      EXPECT_EQ(code, "UNAVAILABLE") << result;
      EXPECT_GT(count, 0) << result;
    }
  }
}

TEST(BenchProcessTest, SaysWhatItWaitsForAfterItsTime) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  const auto bench =
      StartBench(*server, {"--warmup=0s", "--duration=5s", "--timeout=30s", "--max_attempts=1"});
  ASSERT_TRUE(AwaitAnswers(server.get(), 20));
  ASSERT_TRUE(server->process().Signal(SIGSTOP).ok());
  ASSERT_TRUE(WaitUntilStopped(server->process().pid()));
  // By the end of the time each of the 8 has sent a call that nobody answers.
  EXPECT_TRUE(bench
                  ->WaitForLine("waiting for 8 calls in flight, the oldest for .* s \\(they end "
                                "within --timeout=30s\\)",
                                kPatience)
                  .ok());
  ASSERT_TRUE(server->process().Signal(SIGCONT).ok());
  EXPECT_EQ(ExitCode(bench.get()), 0);
}

TEST(BenchProcessTest, CtrlCWhileItWaitsTellsWhatWasSeenAndEndsIt) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  const auto bench = StartBench(
      *server, {"--json", "--warmup=0s", "--duration=5s", "--timeout=1h", "--max_attempts=1"});
  ASSERT_TRUE(AwaitAnswers(server.get(), 20));
  ASSERT_TRUE(server->process().Signal(SIGSTOP).ok());
  ASSERT_TRUE(WaitUntilStopped(server->process().pid()));
  ASSERT_TRUE(bench->WaitForLine("waiting for 8 calls in flight", kPatience).ok());
  ASSERT_TRUE(bench->Signal(SIGINT).ok());
  EXPECT_EQ(ExitCode(bench.get()), -SIGINT);
  ASSERT_TRUE(server->process().Signal(SIGCONT).ok());
  const json result = json::parse(bench->Stdout(), nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(result.is_object()) << bench->Stdout();
  EXPECT_GT(result["calls_ok"], 0);
  EXPECT_EQ(result["calls_unfinished"], 8);
  EXPECT_TRUE(result["errors_of_unfinished"].empty()) << result;
  EXPECT_EQ(result["verified"], nullptr);
}

TEST(BenchProcessTest, CtrlCTellsWhatWasSeen) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  for (const char* loop : {"--concurrency=8", "--rate=100"}) {
    SCOPED_TRACE(loop);
    const double before =
        std::max(0.0, server->Metric("expertmesh_calls_total{code=\"OK\",method=\"Forward\"}"));
    const auto bench = StartBench(*server, {"--json", "--warmup=0s", "--duration=1h", loop});
    ASSERT_TRUE(AwaitAnswers(server.get(), before + 20));
    ASSERT_TRUE(bench->Signal(SIGINT).ok());
    EXPECT_EQ(ExitCode(bench.get()), 0);
    const json result = json::parse(bench->Stdout());
    EXPECT_GT(result["calls_ok"], 0);
    EXPECT_EQ(result["verified"]["different_bytes"], 0);
  }
}

TEST(BenchProcessTest, AServerThatStopsAnsweringShows) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  for (const char* loop : {"--concurrency=8", "--rate=100"}) {
    SCOPED_TRACE(loop);
    const double before =
        std::max(0.0, server->Metric("expertmesh_calls_total{code=\"OK\",method=\"Forward\"}"));
    const auto bench = StartBench(*server, {"--json", "--warmup=0s", "--duration=1s",
                                            "--timeout=1500ms", "--max_attempts=1", loop});
    ASSERT_TRUE(AwaitAnswers(server.get(), before + 20));
    ASSERT_TRUE(server->process().Signal(SIGSTOP).ok());
    const int exit_code = ExitCode(bench.get());
    ASSERT_TRUE(server->process().Signal(SIGCONT).ok());
    EXPECT_EQ(exit_code, 1);
    const json result = json::parse(bench->Stdout());
    EXPECT_GT(result["calls_ok"], 0);
    EXPECT_GE(result["calls_unfinished"], 8) << result;
    EXPECT_GT(result["oldest_unfinished_micros"], result["latency_micros"]["p50"]) << result;
    EXPECT_EQ(result["errors_of_unfinished"]["DEADLINE_EXCEEDED"], result["calls_unfinished"]);
    EXPECT_EQ(result["verified"], nullptr);
  }
}

TEST(BenchProcessTest, NothingThere) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  ASSERT_TRUE(server->process().Kill().ok());
  ASSERT_TRUE(server->process().Wait(kPatience).ok());
  const auto bench = StartBench(*server, {"--timeout=1s"});
  EXPECT_EQ(ExitCode(bench.get()), 1);
  EXPECT_THAT(bench->Stderr(), HasSubstr("UNAVAILABLE"));
  EXPECT_THAT(bench->Stderr(), HasSubstr("is the server up"));
  const auto typo = StartBench(*server, {"--no_such_flag"});
  EXPECT_EQ(ExitCode(typo.get()), 2);
}

}  // namespace
}  // namespace expertmesh
