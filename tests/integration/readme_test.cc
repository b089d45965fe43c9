// What README.md says one may type: each of its calls, against a server as its scripts start it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/integration/process.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

// The commands of the file's bash blocks that start with `program`; lines that are indented belong
// to the one before.
std::vector<std::string> Commands(const std::string& path, const std::string& program) {
  std::vector<std::string> commands;
  std::ifstream file(path);
  bool in_block = false;
  bool in_command = false;
  for (std::string line; std::getline(file, line);) {
    if (absl::StartsWith(line, "```")) {
      in_block = line == "```bash";
      in_command = false;
    } else if (in_command && absl::StartsWith(line, "    ")) {
      absl::StrAppend(&commands.back(), "\n", line);
    } else {
      in_command = in_block && absl::StartsWith(line, absl::StrCat(program, " "));
      if (in_command) commands.push_back(line);
    }
  }
  return commands;
}

class ReadmeTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/expertmesh_readme_XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    const FinishedProcess written = Run("expertmesh checkpoint --out=build/tiny");
    ASSERT_EQ(written.exit_code, 0) << written.err;
    server_ = ServerUnderTest::Start(
        {.checkpoint = folder_ + "/tiny", .args = {"--local_ranks=2", "--allow_admin"}});
    ASSERT_NE(server_, nullptr);
  }
  void TearDown() override {
    server_.reset();
    std::filesystem::remove_all(folder_);
  }

  // With this test's folder for build/, its server for the default one, and little time.
  FinishedProcess Run(const std::string& command) {
    std::string text =
        absl::StrReplaceAll(command, {{"build/", folder_ + "/"},
                                      {"--duration=5s", "--duration=2s --warmup=0s"},
                                      {"--duration=30s", "--duration=2s --warmup=0s"}});
    if (server_ != nullptr) {
      text = absl::StrReplaceAll(text, {{"127.0.0.1:50051", server_->address()}});
      if (absl::StartsWith(text, "expertmesh ")) {
        const size_t end = text.find(' ', sizeof("expertmesh ") - 1);
        text.insert(std::min(end, text.size()), absl::StrCat(" --target=", server_->address()));
      }
    }
    const std::string programs = std::filesystem::path(SiblingBinary("expertmesh")).parent_path();
    return RunToEnd({.path = "/bin/bash",
                     .args = {"-c", text},
                     .environment = {absl::StrCat("PATH=", programs, ":", getenv("PATH"))}});
  }

  std::string folder_;
  std::unique_ptr<ServerUnderTest> server_;
};

TEST_F(ReadmeTest, EveryGrpcurlCall) {
  const std::vector<std::string> commands = Commands("README.md", "grpcurl");
  ASSERT_GE(commands.size(), 7u);
  std::string drain;
  for (const std::string& command : commands) {
    SCOPED_TRACE(command);
    // It ends the service: the last one.
    if (absl::StrContains(command, "/Drain")) {
      drain = command;
      continue;
    }
    const FinishedProcess result = Run(command);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.out, "");
  }
  const FinishedProcess result = Run(drain);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("\"complete\": true"));
}

TEST_F(ReadmeTest, EveryCallOfTheCommandLineClient) {
  const std::vector<std::string> commands = Commands("README.md", "expertmesh");
  ASSERT_GE(commands.size(), 8u);
  for (const std::string& command : commands) {
    SCOPED_TRACE(command);
    // Until Ctrl-C.
    if (absl::StrContains(command, "--watch")) continue;
    const FinishedProcess result = Run(command);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.out, "");
  }
}

}  // namespace
}  // namespace expertmesh
