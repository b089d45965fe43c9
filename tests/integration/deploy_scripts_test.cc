// The scripts of deploy/ as a person runs them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "tests/integration/process.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kPlenty = absl::Minutes(1);

std::string BinFolder() { return std::filesystem::path(SiblingBinary("expertmesh")).parent_path(); }

FinishedProcess Script(const std::string& path, std::vector<std::string> args) {
  return RunToEnd({.path = path, .args = std::move(args)});
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Index of the only line that starts with `speaker` and contains `part`; -1 and a failed test
// where there is none or there are several.
int TheLine(const std::vector<std::string>& lines, const std::string& speaker,
            const std::string& part) {
  int found = -1;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (!absl::StartsWith(lines[i], speaker) || !absl::StrContains(lines[i], part)) continue;
    if (found != -1) ADD_FAILURE() << speaker << " says '" << part << "' twice";
    found = static_cast<int>(i);
  }
  EXPECT_NE(found, -1) << speaker << " never says '" << part << "'";
  return found;
}

// deploy/local_cluster.sh as a terminal runs it: the leader of a process group, all of which gets
// Ctrl-C.
class LocalCluster {
 public:
  explicit LocalCluster(std::vector<std::string> args) {
    // Whoever runs tests in the background ignores SIGINT, and what a shell finds ignored it cannot
    // trap.
    args.insert(args.begin(), {"--default-signal=INT", "setsid", "deploy/local_cluster.sh",
                               "--listen=127.0.0.1:0", "--bin", BinFolder()});
    auto started = ServerProcess::Start({.path = "/usr/bin/env", .args = std::move(args)});
    EXPECT_TRUE(started.ok()) << started.status();
    if (started.ok()) script_ = *std::move(started);
  }
  // A script that is killed could not end what it started.
  ~LocalCluster() {
    if (script_ == nullptr || ended_) return;
    script_->Terminate().IgnoreError();
    EXPECT_EQ(script_->Wait(kPlenty).value_or(-1), 0);
  }

  // The match and its groups; empty where the line does not come.
  std::vector<std::string> WaitForLine(const std::string& pattern) {
    auto match = script_->WaitForLine(pattern, kPlenty);
    EXPECT_TRUE(match.ok()) << match.status();
    return match.ok() ? *match : std::vector<std::string>(10);
  }
  void PressCtrlC() { ASSERT_EQ(kill(-script_->pid(), SIGINT), 0); }
  void Kill() {
    ASSERT_TRUE(script_->Kill().ok());
    EXPECT_EQ(WaitForEnd(), -SIGKILL);
  }
  int WaitForEnd() {
    const auto exit_code = script_->Wait(kPlenty);
    EXPECT_TRUE(exit_code.ok()) << exit_code.status();
    ended_ = exit_code.ok();
    return exit_code.value_or(-1);
  }
  std::string Stdout() const { return script_->Stdout(); }
  std::string Stderr() const { return script_->Stderr(); }

 private:
  std::unique_ptr<ServerProcess> script_;
  bool ended_ = false;
};

TEST(DeployScriptsTest, ALocalClusterServesAndSaysWhatToTry) {
  LocalCluster cluster({"3"});
  const std::string target = cluster.WaitForLine(
      "^local_cluster \\| ready: clients call (127\\.0\\.0\\.1:[0-9]+); pids")[1];
  cluster.WaitForLine("^control-plane \\| .* metrics on http://127\\.0\\.0\\.1:[0-9]+/metrics");
  cluster.WaitForLine("^local_cluster \\| metrics: the control plane says above where");
  const std::string folder =
      cluster.WaitForLine("forward --tokens=16 --check=(/[^ ]+) --target")[1];
  const FinishedProcess forward =
      RunToEnd({.path = SiblingBinary("expertmesh"),
                .args = {"forward", "--tokens=9", absl::StrCat("--target=", target),
                         absl::StrCat("--check=", folder)}});
  EXPECT_EQ(forward.exit_code, 0) << forward.err;
  EXPECT_THAT(forward.out, HasSubstr("3 ranks"));
}

// An epoch after `epoch`; which one.
int WaitForEpochAfter(LocalCluster& cluster, int epoch) {
  std::string numbers;
  for (int next = epoch + 1; next < epoch + 20; ++next) absl::StrAppend(&numbers, "|", next);
  return atoi(cluster
                  .WaitForLine(absl::StrCat("^control-plane \\| .* an epoch stands epoch=(",
                                            numbers.substr(1), ") "))[1]
                  .c_str());
}

TEST(DeployScriptsTest, ARankThatEndsIsStartedAgainHoweverItEnds) {
  LocalCluster cluster({"2"});
  const std::string first = cluster.WaitForLine("^local_cluster \\| rank 1 is pid ([0-9]+)")[1];
  int epoch = WaitForEpochAfter(cluster, 0);
  ASSERT_EQ(kill(atoi(first.c_str()), SIGKILL), 0);
  cluster.WaitForLine(absl::StrCat("^local_cluster \\| rank 1 \\(pid ", first,
                                   "\\) ended by SIGKILL; it is started"));
  epoch = WaitForEpochAfter(cluster, epoch);
  const std::string zero = cluster.WaitForLine("^local_cluster \\| rank 0 is pid ([0-9]+)")[1];
  ASSERT_EQ(kill(atoi(zero.c_str()), SIGTERM), 0);
  cluster.WaitForLine(absl::StrCat("^local_cluster \\| rank 0 \\(pid ", zero,
                                   "\\) ended with exit code 0; it is started"));
  WaitForEpochAfter(cluster, epoch);
}

TEST(DeployScriptsTest, CtrlCReachesTheScriptAloneWhichStopsInOrder) {
  LocalCluster cluster({"2"});
  cluster.WaitForLine("^local_cluster \\| ready");
  cluster.PressCtrlC();
  EXPECT_EQ(cluster.WaitForEnd(), 0);
  const std::vector<std::string> lines = Lines(cluster.Stdout());
  EXPECT_EQ(cluster.Stderr(), "");
  const int stopped = TheLine(lines, "control-plane | ", " I stopped");
  EXPECT_LT(TheLine(lines, "control-plane | ", "stop asked for"), stopped);
  // One's last words may be printed after the other's, but each is told to stop once.
  TheLine(lines, "rank 0        | ", "stop asked for");
  TheLine(lines, "rank 1        | ", "stop asked for");
  TheLine(lines, "rank 0        | ", " I stopped");
  TheLine(lines, "rank 1        | ", " I stopped");
  EXPECT_THAT(cluster.Stdout(), Not(HasSubstr("started again")));
  // Ranks left because the control plane was done, not before.
  EXPECT_THAT(cluster.Stdout(), Not(HasSubstr("its stream ended")));
}

TEST(DeployScriptsTest, CtrlCEndsARankThatWasStopped) {
  LocalCluster cluster({"2"});
  const std::string pid = cluster.WaitForLine("^local_cluster \\| rank 1 is pid ([0-9]+)")[1];
  cluster.WaitForLine("^local_cluster \\| ready");
  ASSERT_EQ(kill(atoi(pid.c_str()), SIGSTOP), 0);
  cluster.PressCtrlC();
  EXPECT_EQ(cluster.WaitForEnd(), 0);
  EXPECT_NE(kill(atoi(pid.c_str()), 0), 0) << "it is still there";
}

TEST(DeployScriptsTest, NothingOutlivesAScriptThatIsKilled) {
  LocalCluster cluster({"2"});
  const std::vector<std::string> pids =
      cluster.WaitForLine("pids: control plane ([0-9]+), ranks from 0 on ([0-9]+) ([0-9]+)");
  // The last thing that it says comes after all of it was started.
  cluster.WaitForLine("Ctrl-C stops everything");
  cluster.Kill();
  for (size_t i = 1; i < pids.size(); ++i) {
    const pid_t pid = atoi(pids[i].c_str());
    ASSERT_GT(pid, 0);
    const absl::Time deadline = absl::Now() + kPlenty;
    while (kill(pid, 0) == 0 && absl::Now() < deadline) {
    }
    EXPECT_NE(kill(pid, 0), 0) << pids[i] << " is still there";
  }
}

TEST(DeployScriptsTest, AControlPlaneThatCannotStartEndsTheScript) {
  LocalCluster cluster({"2", "--", "--dispatch=passthrough"});
  EXPECT_EQ(cluster.WaitForEnd(), 1);
  EXPECT_THAT(cluster.Stdout(), HasSubstr("control-plane | "));
  EXPECT_THAT(cluster.Stdout(), HasSubstr("the control plane ended with exit code 2"));
}

TEST(DeployScriptsTest, WrongArgumentsExitWithTwoAndSayWhatIsWrong) {
  const struct {
    std::string script;
    std::vector<std::string> args;
    std::string says;
  } cases[] = {
      {"local_cluster", {}, "how many ranks?"},
      {"local_cluster", {"x"}, "'x' is no number of ranks: 1 to 64"},
      {"local_cluster", {"0"}, "'0' is no number of ranks"},
      {"local_cluster", {"99999999999999999999"}, "is no number of ranks"},
      {"local_cluster", {"2", "3"}, "two numbers of ranks"},
      {"local_cluster", {"2", "--checkpoint"}, "--checkpoint has no value"},
      {"local_cluster", {"2", "--listen=here"}, "--listen is 'here'; it takes HOST:PORT"},
      {"local_cluster", {"2", "--nonsense"}, "there is no option '--nonsense'"},
      {"quickstart", {"--serve"}, "--serve has no value"},
      {"quickstart", {"--serve="}, "--serve is empty"},
      {"quickstart", {"--listen", "50051"}, "--listen is '50051'; it takes HOST:PORT"},
      {"quickstart", {"--nonsense"}, "there is no option '--nonsense'"},
      {"install_deps", {"--nonsense"}, "unknown argument '--nonsense'"},
  };
  for (const auto& bad : cases) {
    const FinishedProcess result = Script(absl::StrCat("deploy/", bad.script, ".sh"), bad.args);
    EXPECT_EQ(result.exit_code, 2) << bad.says;
    EXPECT_THAT(result.err, HasSubstr(bad.says));
    EXPECT_THAT(result.err, HasSubstr(absl::StrCat("usage: deploy/", bad.script, ".sh")));
    // bash's own words.
    EXPECT_THAT(result.err, Not(HasSubstr(": line "))) << bad.says;
  }
}

TEST(DeployScriptsTest, MissingFilesAreNamed) {
  FinishedProcess result =
      Script("deploy/local_cluster.sh", {"2", "--bin", BinFolder(), "--checkpoint=/no/such"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("--checkpoint: there is no /no/such/config.json"));
  result = Script("deploy/local_cluster.sh", {"2", "--bin=/no/such"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("there is no program /no/such/expertmesh"));
  result = Script("deploy/quickstart.sh", {"--serve", "/no/such"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("--serve: there is no /no/such/config.json"));
}

}  // namespace
}  // namespace expertmesh
