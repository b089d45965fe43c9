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

// False at once when `bench` ends before that.
bool AwaitAnswers(ServerUnderTest* server, ServerProcess* bench, double num_calls) {
  const absl::Time deadline = absl::Now() + kPatience;
  while (absl::Now() < deadline && !bench->Wait(absl::ZeroDuration()).ok()) {
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
  const auto bench = StartBench(*server, {"--json", "--warmup=0s", "--duration=1h", "--tokens=1000",
                                          "--concurrency=64", "--max_attempts=1"});
  ASSERT_TRUE(
      AwaitAnswers(server.get(), bench.get(), 64 + 20));  // the bench has seen 20 of them at least
  ASSERT_TRUE(bench->WaitForLine("first error: RESOURCE_EXHAUSTED", kPatience).ok());
  ASSERT_TRUE(bench->Signal(SIGINT).ok());
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
  const auto bench = StartBench(*server, {"--warmup=0s", "--duration=1h", "--tokens=11"});
  ASSERT_TRUE(bench->WaitForLine("first error: INVALID_ARGUMENT", kPatience).ok());
  ASSERT_TRUE(bench->Signal(SIGINT).ok());
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
  ASSERT_TRUE(AwaitAnswers(server.get(), bench.get(), 20));
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
    ASSERT_TRUE(AwaitAnswers(server.get(), bench.get(), 20));
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

// A bench whose time is over while its 8 calls are in flight at a server that is stopped.
class WaitingBench {
 public:
  // Fails the current test when it does not come to that.
  explicit WaitingBench(const std::string& timeout) {
    // By the end of the time each of the 8 has sent a call that nobody answers; on a busy machine
    // the time may be over before that.
    for (const char* duration : {"5s", "30s"}) {
      server_ = ServerUnderTest::Start({.checkpoint = kFixture});
      if (server_ == nullptr) return;
      bench_ = StartBench(*server_, {"--json", "--warmup=0s", absl::StrCat("--duration=", duration),
                                     absl::StrCat("--timeout=", timeout), "--max_attempts=1"});
      if (!AwaitAnswers(server_.get(), bench_.get(), 20)) continue;
      EXPECT_TRUE(server_->process().Signal(SIGSTOP).ok());
      EXPECT_TRUE(WaitUntilStopped(server_->process().pid()));
      const auto waits = bench_->WaitForLine("waiting for ([0-9]+) calls in flight", kPatience);
      if (waits.ok() && (*waits)[1] == "8") {
        is_waiting_ = true;
        return;
      }
    }
    ADD_FAILURE() << "it never waited for 8 calls\n" << bench_->Stderr();
  }
  bool is_waiting() const { return is_waiting_; }
  ServerProcess& server() { return server_->process(); }
  ServerProcess& bench() { return *bench_; }

 private:
  std::unique_ptr<ServerUnderTest> server_;
  std::unique_ptr<ServerProcess> bench_;
  bool is_waiting_ = false;
};

TEST(BenchProcessTest, SaysWhatItWaitsForAfterItsTime) {
  WaitingBench waiting("10m");
  ASSERT_TRUE(waiting.is_waiting());
  EXPECT_TRUE(waiting.bench()
                  .WaitForLine("waiting for 8 calls in flight, the oldest for .* s \\(they end "
                               "within --timeout=10m\\)",
                               kPatience)
                  .ok());
  ASSERT_TRUE(waiting.server().Signal(SIGCONT).ok());
  EXPECT_EQ(ExitCode(&waiting.bench()), 0);
}

TEST(BenchProcessTest, CtrlCWhileItWaitsTellsWhatWasSeenAndEndsIt) {
  WaitingBench waiting("1h");
  ASSERT_TRUE(waiting.is_waiting());
  ASSERT_TRUE(waiting.bench().Signal(SIGINT).ok());
  EXPECT_EQ(ExitCode(&waiting.bench()), -SIGINT);
  ASSERT_TRUE(waiting.server().Signal(SIGCONT).ok());
  const std::string out = waiting.bench().Stdout();
  const json result = json::parse(out, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(result.is_object()) << out;
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
    ASSERT_TRUE(AwaitAnswers(server.get(), bench.get(), before + 20));
    ASSERT_TRUE(bench->Signal(SIGINT).ok());
    EXPECT_EQ(ExitCode(bench.get()), 0);
    const json result = json::parse(bench->Stdout());
    EXPECT_GT(result["calls_ok"], 0);
    EXPECT_EQ(result["verified"]["different_bytes"], 0);
  }
}

TEST(BenchProcessTest, AServerThatStopsAnsweringShows) {
  for (const char* loop : {"--concurrency=8", "--rate=100"}) {
    SCOPED_TRACE(loop);
    json result;
    int exit_code = 0;
    // On a busy machine a second may be over before the server is stopped.
    for (const int seconds : {1, 5, 20}) {
      const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
      ASSERT_NE(server, nullptr);
      const auto bench = StartBench(
          *server, {"--json", "--warmup=0s", absl::StrCat("--duration=", seconds, "s"),
                    absl::StrCat("--timeout=", seconds * 1500, "ms"), "--max_attempts=1", loop});
      if (!AwaitAnswers(server.get(), bench.get(), 20)) continue;
      ASSERT_TRUE(server->process().Signal(SIGSTOP).ok());
      exit_code = ExitCode(bench.get());
      ASSERT_NE(exit_code, -1000);
      result = json::parse(bench->Stdout());
      const json& late = result["errors_of_unfinished"];
      if (result["calls_ok"] > 0 && result["calls_unfinished"] >= 8 &&
          late.value("DEADLINE_EXCEEDED", 0) == result["calls_unfinished"]) {
        break;
      }
    }
    EXPECT_EQ(exit_code, 1);
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
  const auto bench = StartBench(*server, {"--timeout=1m"});
  EXPECT_EQ(ExitCode(bench.get()), 1);
  EXPECT_THAT(bench->Stderr(), HasSubstr("UNAVAILABLE"));
  EXPECT_THAT(bench->Stderr(), HasSubstr("is the server up"));
  const auto typo = StartBench(*server, {"--no_such_flag"});
  EXPECT_EQ(ExitCode(typo.get()), 2);
}

}  // namespace
}  // namespace expertmesh
