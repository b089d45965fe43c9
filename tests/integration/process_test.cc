#include "tests/integration/process.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kPlenty = absl::Seconds(30);
// Runs until a signal ends it.
constexpr char kForever[] = "exec tail -f /dev/null";

std::unique_ptr<ServerProcess> StartShell(const std::string& script) {
  auto process = ServerProcess::Start({.path = "/bin/sh", .args = {"-c", script}});
  EXPECT_TRUE(process.ok()) << process.status();
  return process.ok() ? *std::move(process) : nullptr;
}

TEST(ProcessTest, FindsALineOfEitherStreamAndItsGroups) {
  auto process =
      StartShell(std::string("echo listening on 127.0.0.1:4711; echo ready >&2; ") + kForever);
  ASSERT_NE(process, nullptr);
  auto port = process->WaitForLine("listening on ([0-9.]+):([0-9]+)", kPlenty);
  ASSERT_TRUE(port.ok()) << port.status();
  EXPECT_THAT(*port, ElementsAre("listening on 127.0.0.1:4711", "127.0.0.1", "4711"));
  EXPECT_TRUE(process->WaitForLine("^ready$", kPlenty).ok());
  EXPECT_EQ(process->Stdout(), "listening on 127.0.0.1:4711\n");
  EXPECT_EQ(process->Stderr(), "ready\n");
}

TEST(ProcessTest, ALineCountsOnlyWhenItIsWhole) {
  auto process = StartShell(std::string("printf 'port 12'; ") + kForever);
  ASSERT_NE(process, nullptr);
  auto line = process->WaitForLine("port ([0-9]+)", absl::Milliseconds(50));
  EXPECT_EQ(line.status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(ProcessTest, WaitForLineFailsAtOnceWhenTheProgramEnds) {
  auto process = StartShell("echo no such flag >&2; exit 3");
  ASSERT_NE(process, nullptr);
  auto line = process->WaitForLine("listening", absl::InfiniteDuration());
  EXPECT_EQ(line.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(line.status().message(), HasSubstr("no such flag"));
  auto code = process->Wait(kPlenty);
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, 3);
}

TEST(ProcessTest, TerminateLetsTheProgramChooseItsExitCode) {
  auto process = StartShell("trap 'echo drained; exit 0' TERM; echo up; while :; do read x; done");
  ASSERT_NE(process, nullptr);
  ASSERT_TRUE(process->WaitForLine("up", kPlenty).ok());
  ASSERT_TRUE(process->Terminate().ok());
  auto code = process->Wait(kPlenty);
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, 0);
  EXPECT_THAT(process->Stdout(), HasSubstr("drained"));
}

TEST(ProcessTest, WaitTellsARunningProgramAndTheSignalOfAKilledOne) {
  auto process = StartShell(kForever);
  ASSERT_NE(process, nullptr);
  EXPECT_EQ(process->Wait(absl::Milliseconds(20)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(process->Kill().ok());
  auto code = process->Wait(kPlenty);
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, -SIGKILL);
  EXPECT_EQ(process->Terminate().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ProcessTest, CapturesMoreThanAPipeHolds) {
  auto process = StartShell("head -c 300000 /dev/zero | tr '\\0' x; echo; echo end");
  ASSERT_NE(process, nullptr);
  ASSERT_TRUE(process->Wait(kPlenty).ok());
  EXPECT_EQ(process->Stdout(), std::string(300000, 'x') + "\nend\n");
}

TEST(ProcessTest, AChildOfTheProgramThatKeepsThePipeOpenDelaysNothing) {
  auto process = StartShell("tail -f /dev/null & echo child $!");
  ASSERT_NE(process, nullptr);
  auto code = process->Wait(kPlenty);
  ASSERT_TRUE(code.ok()) << code.status();
  auto child = process->WaitForLine("child ([0-9]+)", kPlenty);
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_EQ(kill(std::stoi((*child)[1]), SIGKILL), 0);
}

TEST(ProcessTest, TheDestructorEndsTheProgram) {
  auto process = StartShell(kForever);
  ASSERT_NE(process, nullptr);
  const pid_t pid = process->pid();
  EXPECT_EQ(kill(pid, 0), 0);
  process.reset();
  EXPECT_EQ(kill(pid, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

TEST(ProcessTest, TheProgramDiesWithTheTestThatStartedIt) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const pid_t test = fork();
  if (test == 0) {
    // A test that aborts: its destructors do not run.
    auto process = ServerProcess::Start({.path = "/usr/bin/tail", .args = {"-f", "/dev/null"}});
    const pid_t pid = process.ok() ? (*process)->pid() : -1;
    if (write(pipe_fds[1], &pid, sizeof(pid)) != sizeof(pid)) _exit(1);
    kill(getpid(), SIGKILL);
  }
  close(pipe_fds[1]);
  pid_t pid = -1;
  ASSERT_EQ(read(pipe_fds[0], &pid, sizeof(pid)), static_cast<ssize_t>(sizeof(pid)));
  ASSERT_GT(pid, 0);
  ASSERT_EQ(waitpid(test, nullptr, 0), test);
  // The program's own copy of the pipe's write end is the last one: its end is this pipe's end.
  char byte;
  EXPECT_EQ(read(pipe_fds[0], &byte, 1), 0);
  close(pipe_fds[0]);
}

TEST(ProcessTest, SaysWhyAProgramCannotRun) {
  auto process = ServerProcess::Start({.path = "/no/such/program"});
  EXPECT_EQ(process.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(process.status().message(), HasSubstr("/no/such/program: No such file"));
}

TEST(ProcessTest, TheGivenEnvironmentWinsOverTheInheritedOne) {
  ASSERT_EQ(setenv("EXPERTMESH_PROCESS_TEST", "inherited", 1), 0);
  auto process = ServerProcess::Start({.path = "/usr/bin/printenv",
                                       .args = {"EXPERTMESH_PROCESS_TEST"},
                                       .environment = {"EXPERTMESH_PROCESS_TEST=given"}});
  ASSERT_TRUE(process.ok()) << process.status();
  ASSERT_TRUE((*process)->Wait(kPlenty).ok());
  EXPECT_EQ((*process)->Stdout(), "given\n");
}

TEST(ProcessTest, ASiblingBinaryIsBesideTheTest) {
  EXPECT_EQ(access(SiblingBinary("tests_process_test").c_str(), X_OK), 0);
}

}  // namespace
}  // namespace expertmesh
