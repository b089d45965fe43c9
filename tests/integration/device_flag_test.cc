// --device where there is no GPU.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/integration/process.h"

namespace expertmesh {
namespace {

constexpr char kCheckpoint[] = "--checkpoint=tests/golden/qwen3_moe_bfloat16";

struct Program {
  std::string name;
  std::vector<std::string> args;
};

class DeviceFlagTest : public testing::TestWithParam<Program> {
 protected:
  FinishedProcess Run(const std::string& device, const std::vector<std::string>& more_args = {}) {
    std::vector<std::string> args = GetParam().args;
    args.insert(args.end(), more_args.begin(), more_args.end());
    args.push_back(kCheckpoint);
    args.push_back("--device=" + device);
    // Whatever GPUs the machine has, the program sees none.
    return RunToEnd({.path = SiblingBinary(GetParam().name),
                     .args = std::move(args),
                     .environment = {"CUDA_VISIBLE_DEVICES="}});
  }
};

TEST_P(DeviceFlagTest, WithoutAGpuOneLineSaysSo) {
  const FinishedProcess finished = Run("cuda:0");
  EXPECT_EQ(finished.exit_code, 1);
  EXPECT_THAT(
      finished.err,
      testing::MatchesRegex(
          GetParam().name +
          ": --device=cuda:0: (this build has no CUDA: README.md, GPU ranks, tells of the one "
          "that has, cmake --preset cuda|no GPU: "
          "cudaGetDeviceCount: [^\n]+)\n"));
}

TEST_P(DeviceFlagTest, WhatIsNoDeviceIsRefused) {
  for (const char* const device : {"gpu", "cuda", "cuda:", "cuda:x", "cuda:-1", "cuda:0:1", ""}) {
    const FinishedProcess finished = Run(device);
    EXPECT_EQ(finished.exit_code, 2);
    EXPECT_THAT(finished.err, testing::HasSubstr("--device is '" + std::string(device) +
                                                 "'; known: cpu, cuda:0, cuda:1, ..."));
  }
}

TEST_P(DeviceFlagTest, CpusKeepNoFp8) {
  const FinishedProcess native = Run("cpu", {"--fp8_weights=native"});
  EXPECT_EQ(native.exit_code, 2);
  EXPECT_THAT(native.err, testing::HasSubstr("--fp8_weights=native needs --device=cuda:N"));
  const FinishedProcess unknown = Run("cpu", {"--fp8_weights=int4"});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_THAT(unknown.err, testing::HasSubstr("--fp8_weights is 'int4'; known: auto, native,"));
}

INSTANTIATE_TEST_SUITE_P(
    Programs, DeviceFlagTest,
    testing::Values(Program{"expertmesh-control-plane", {"--listen=127.0.0.1:0"}},
                    Program{"expertmesh-expert-server",
                            {"--control_plane=127.0.0.1:1", "--ep_rank=0", "--ep_size=1"}}),
    [](const auto& test) {
      return test.param.name == "expertmesh-control-plane" ? "ControlPlane" : "ExpertServer";
    });

TEST(ExpertServerFlagsTest, WhatWouldDoNothingOrIsTooMuchIsRefused) {
  struct Case {
    std::vector<std::string> args;
    std::string says;
  };
  for (const Case& c : std::vector<Case>{
           {{kCheckpoint, "--nccl_library=x.so"},
            "--nccl_library would do nothing: it is for GPUs"},
           {{kCheckpoint, "--device=cuda:0", "--isa=avx2"}, "--isa would do nothing: it is for"},
           {{"--model=a=x", "--model_name=b"}, "--model_name would do nothing: it is for"},
           {{kCheckpoint, "--threads=100000"}, "--threads is 100000; at most 4096"},
           {{kCheckpoint, "--threads=-1"}, "--threads is -1; at least 0"}}) {
    SCOPED_TRACE(testing::PrintToString(c.args));
    std::vector<std::string> args = {"--control_plane=127.0.0.1:1", "--ep_rank=0", "--ep_size=1"};
    args.insert(args.end(), c.args.begin(), c.args.end());
    const FinishedProcess finished =
        RunToEnd({.path = SiblingBinary("expertmesh-expert-server"), .args = args});
    EXPECT_EQ(finished.exit_code, 2);
    EXPECT_THAT(finished.err, testing::StartsWith("expertmesh-expert-server: --"));
    EXPECT_THAT(finished.err, testing::HasSubstr(c.says));
  }
}

// Rather than after all weights are loaded.
TEST(ExpertServerFlagsTest, AnAddressWithoutAPortIsRefusedAtOnce) {
  for (const std::string address :
       {"127.0.0.1", "9999", "host:", "host:0", "[::1]", "host:65536", "1:2:3"}) {
    const FinishedProcess finished =
        RunToEnd({.path = SiblingBinary("expertmesh-expert-server"),
                  .args = {"--control_plane=" + address, "--ep_rank=0", "--ep_size=1",
                           "--checkpoint=/no/such/checkpoint"}});
    EXPECT_EQ(finished.exit_code, 2);
    EXPECT_THAT(finished.err,
                testing::StartsWith("expertmesh-expert-server: --control_plane is '" + address +
                                    "'; expected host:port or [v6]:port, the port 1 to 65535\n"));
  }
  for (const std::string address : {"localhost:1", "[::1]:1", "dns:///localhost:1"}) {
    const FinishedProcess finished =
        RunToEnd({.path = SiblingBinary("expertmesh-expert-server"),
                  .args = {"--control_plane=" + address, "--ep_rank=0", "--ep_size=1",
                           "--checkpoint=/no/such/checkpoint"}});
    EXPECT_EQ(finished.exit_code, 1);
    EXPECT_THAT(finished.err, testing::HasSubstr("/no/such/checkpoint"));
  }
}

// They take twice the memory that the checkpoint's size suggests.
TEST(Fp8OnCpusTest, AServerSaysThatItDequantizes) {
  const std::string checkpoint = "--checkpoint=tests/golden/deepseek_v3_fp8";
  for (const Program& program :
       {Program{"expertmesh-control-plane",
                {checkpoint, "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0"}},
        Program{"expertmesh-expert-server",
                {checkpoint, "--control_plane=127.0.0.1:1", "--ep_rank=0", "--ep_size=2"}}}) {
    SCOPED_TRACE(program.name);
    auto server = ServerProcess::Start({.path = SiblingBinary(program.name), .args = program.args});
    ASSERT_TRUE(server.ok()) << server.status();
    const auto line = (*server)->WaitForLine(
        " I fp8 experts are dequantized to bfloat16, .* model=deepseek_v3_fp8 bytes=([0-9]+)$",
        absl::Minutes(1));
    ASSERT_TRUE(line.ok()) << line.status();
    EXPECT_GT(std::stoll((*line)[1]), 0);
  }
}

TEST(DeviceOfRemoteRanksTest, IsTheirs) {
  const FinishedProcess finished = RunToEnd(
      {.path = SiblingBinary("expertmesh-control-plane"),
       .args = {kCheckpoint, "--ep_size=2", "--rank_listen=127.0.0.1:0", "--device=cuda:0"}});
  EXPECT_EQ(finished.exit_code, 2);
  EXPECT_THAT(finished.err, testing::HasSubstr("--device is of --local_ranks"));
  const FinishedProcess fp8 = RunToEnd(
      {.path = SiblingBinary("expertmesh-control-plane"),
       .args = {kCheckpoint, "--ep_size=2", "--rank_listen=127.0.0.1:0", "--fp8_weights=native"}});
  EXPECT_EQ(fp8.exit_code, 2);
  EXPECT_THAT(fp8.err, testing::HasSubstr("--fp8_weights would do nothing: with --ep_size"));
}

}  // namespace
}  // namespace expertmesh
