// What a server makes of its flags and ports, and what it then says of itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "tests/integration/bad_requests.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kService[] = "expertmesh.v1.ExpertService";
constexpr char kFixture[] = "tests/golden/qwen3_moe_bfloat16";

TEST(ServerStartTest, OnePortIsNeverShared) {
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

TEST(ServerStartTest, WhatIsWrongWithAStartIsSaid) {
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

TEST(ServerStartTest, HelpIsNoError) {
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

TEST(ServerStartTest, RanksWithoutExpertsAreMentioned) {
  const auto server =
      ServerUnderTest::Start({.checkpoint = kFixture, .args = {"--local_ranks=14"}});
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(server->process().Stderr(), HasSubstr("more ranks than a layer has experts"));
  EXPECT_THAT(server->process().Stderr(), HasSubstr("idle=2"));
}

TEST(ServerStartTest, ReflectionNamesTheServices) {
  const auto server = ServerUnderTest::Start({.checkpoint = kFixture});
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(server->ReflectedServices(),
              testing::IsSupersetOf({std::string(kService), std::string("grpc.health.v1.Health")}));
}

TEST(ServerStartTest, StatusForOperatorsWhereItIsAllowed) {
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

TEST(ServerStartTest, TwoModelsInOneProcess) {
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
