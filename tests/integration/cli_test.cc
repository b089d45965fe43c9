// The command line client as a person runs it, against the real server.

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/process.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

FinishedProcess Cli(std::vector<std::string> args) {
  return RunToEnd({.path = SiblingBinary("expertmesh"), .args = std::move(args)});
}

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A checkpoint that the CLI wrote and a server of two ranks that serves it.
class CliTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = testing::TempDir() + "/expertmesh_cli_XXXXXX";
    ASSERT_NE(mkdtemp(directory_.data()), nullptr);
    checkpoint_ = directory_ + "/tiny";
    const FinishedProcess written =
        Cli({"checkpoint", absl::StrCat("--out=", checkpoint_), "--hidden_size=48",
             "--intermediate_size=40", "--num_experts=7", "--experts_per_token=3",
             "--shard_bytes=50000"});
    ASSERT_EQ(written.exit_code, 0) << written.err;
    ASSERT_TRUE(std::filesystem::exists(checkpoint_ + "/model.safetensors.index.json"));
    server_ = ServerUnderTest::Start({.checkpoint = checkpoint_, .args = {"--local_ranks=2"}});
    ASSERT_NE(server_, nullptr);
    target_ = absl::StrCat("--target=", server_->address());
  }
  void TearDown() override {
    server_.reset();
    std::filesystem::remove_all(directory_);
  }

  std::string directory_, checkpoint_, target_;
  std::unique_ptr<ServerUnderTest> server_;
};

TEST_F(CliTest, ModelShowsATableOfLayers) {
  const FinishedProcess model = Cli({"model", target_});
  EXPECT_EQ(model.exit_code, 0) << model.err;
  EXPECT_TRUE(Has(model.out, "Qwen3MoeForCausalLM, hidden size 48")) << model.out;
  EXPECT_TRUE(Has(model.out, "  0-1                 7      3            40")) << model.out;
  const FinishedProcess json = Cli({"model", "--json", target_});
  EXPECT_EQ(nlohmann::json::parse(json.out)["layers"].size(), 2u) << json.out;
}

TEST_F(CliTest, ForwardAgreesWithTheCheckpointHoweverItIsRouted) {
  for (const char* routing : {"topk", "logits", "gate"}) {
    for (const char* dtype : {"float32", "float16", "bfloat16"}) {
      SCOPED_TRACE(absl::StrCat(routing, " ", dtype));
      const FinishedProcess forward =
          Cli({"forward", "--tokens=9", "--layer=1", absl::StrCat("--routing=", routing),
               absl::StrCat("--dtype=", dtype), absl::StrCat("--check=", checkpoint_), target_});
      EXPECT_EQ(forward.exit_code, 0) << forward.out << forward.err;
      EXPECT_TRUE(Has(forward.out, "check         ok: 432 values")) << forward.out;
    }
  }
}

TEST_F(CliTest, ACheckAgainstOtherWeightsIsRefusedBeforeTheCall) {
  const std::string other = directory_ + "/other";
  ASSERT_EQ(
      Cli({"checkpoint", absl::StrCat("--out=", other), "--hidden_size=48",
           "--intermediate_size=40", "--num_experts=7", "--experts_per_token=3", "--weight_seed=9"})
          .exit_code,
      0);
  for (const char* command : {"forward", "bench"}) {
    const FinishedProcess result = Cli({command, absl::StrCat("--check=", other), target_});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(result.out, "");
    EXPECT_TRUE(Has(result.err, "is not the checkpoint that is served (fingerprint "))
        << result.err;
  }
  EXPECT_EQ(server_->Metric("expertmesh_steps_total"), 0);
}

// How many tokens a file has is no fault of the command line; a server's experts are fetched for a
// check by one Explain, which takes so many.
TEST_F(CliTest, ACheckOfTooManyTokensIsRefusedBeforeTheCall) {
  const std::string file = directory_ + "/many.npy";
  ASSERT_EQ(
      Cli({"forward", "--tokens=4097", "--dtype=float32", absl::StrCat("--output=", file), target_})
          .exit_code,
      0);
  const int64_t num_steps = server_->Metric("expertmesh_steps_total");
  const std::pair<std::string, int> cases[] = {{absl::StrCat("--hidden=", file), 1},
                                               {"--tokens=4097", 2}};
  for (const auto& [tokens, exit_code] : cases) {
    const FinishedProcess result =
        Cli({"forward", tokens, "--routing=gate", absl::StrCat("--check=", checkpoint_), target_});
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_TRUE(Has(result.err, "takes at most 4096 tokens, not 4097")) << result.err;
  }
  EXPECT_EQ(server_->Metric("expertmesh_steps_total"), num_steps);
}

// The same tensors, read another way.
TEST_F(CliTest, ACheckAgainstAnotherActivationFails) {
  const std::string other = directory_ + "/other";
  std::filesystem::copy(checkpoint_, other);
  nlohmann::json config = nlohmann::json::parse(std::ifstream(other + "/config.json"));
  config["hidden_act"] = "gelu";
  std::ofstream(other + "/config.json") << config;
  const FinishedProcess forward = Cli({"forward", absl::StrCat("--check=", other), target_});
  EXPECT_EQ(forward.exit_code, 1);
  EXPECT_TRUE(Has(forward.out, "check         FAILED")) << forward.out << forward.err;
}

TEST_F(CliTest, OutputWrittenIsReadBackAsInput) {
  for (const char* ending : {"npy", "safetensors"}) {
    SCOPED_TRACE(ending);
    const std::string file = absl::StrCat(directory_, "/x.", ending);
    FinishedProcess written =
        Cli({"forward", "--tokens=5", "--dtype=float32", absl::StrCat("--output=", file), target_});
    ASSERT_EQ(written.exit_code, 0) << written.err;
    const FinishedProcess read = Cli({"forward", absl::StrCat("--hidden=", file),
                                      absl::StrCat("--check=", checkpoint_), target_});
    EXPECT_EQ(read.exit_code, 0) << read.err;
    EXPECT_TRUE(Has(read.out, "output [5, 48] float32")) << read.out;
  }
}

TEST_F(CliTest, ExplainRunsNothing) {
  const FinishedProcess explain =
      Cli({"explain", "--tokens=6", "--routing=gate", "--json", target_});
  ASSERT_EQ(explain.exit_code, 0) << explain.err;
  const nlohmann::json answer = nlohmann::json::parse(explain.out);
  EXPECT_EQ(answer["ranks"].size(), 2u);
  EXPECT_EQ(answer["topk"], 3);
  EXPECT_EQ(server_->Metric("expertmesh_steps_total"), 0);
}

TEST_F(CliTest, ExplainOfDirectShowsWhoSendsAndNoRankNumberThatIsNone) {
  server_ = ServerUnderTest::Start(
      {.checkpoint = checkpoint_, .args = {"--local_ranks=2", "--dispatch=direct"}});
  ASSERT_NE(server_, nullptr);
  const FinishedProcess explain =
      Cli({"explain", "--tokens=6", absl::StrCat("--target=", server_->address())});
  ASSERT_EQ(explain.exit_code, 0) << explain.err;
  EXPECT_TRUE(Has(explain.out, "between ranks nothing: the control plane sends")) << explain.out;
  EXPECT_TRUE(Has(explain.out, "      0     0  control plane  ")) << explain.out;
  EXPECT_FALSE(Has(explain.out, "-1")) << explain.out;
  EXPECT_FALSE(Has(explain.out, "bytes out")) << explain.out;
  // 18 rows are nothing to be surprised at.
  EXPECT_FALSE(Has(explain.out, "note")) << explain.out;
}

TEST_F(CliTest, BenchCountsWhatTheServerCounts) {
  constexpr char kServed[] = R"(expertmesh_calls_total{code="OK",method="Forward"})";
  const auto bench = ServerProcess::Start(
      {.path = SiblingBinary("expertmesh"),
       .args = {"bench", "--tokens=3", "--concurrency=4", "--warmup=0s", "--duration=1h",
                "--samples=8", "--json", absl::StrCat("--check=", checkpoint_), target_}});
  ASSERT_TRUE(bench.ok()) << bench.status();
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  while (server_->Metric(kServed) < 100) ASSERT_LT(absl::Now(), deadline);
  ASSERT_TRUE((*bench)->Signal(SIGINT).ok());
  const auto exit_code = (*bench)->Wait(absl::Minutes(1));
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  ASSERT_EQ(*exit_code, 0) << (*bench)->Stderr();
  const nlohmann::json result = nlohmann::json::parse((*bench)->Stdout());
  EXPECT_GE(result["calls_ok"], 100 - 4);
  EXPECT_TRUE(result["errors"].empty()) << result;
  EXPECT_EQ(result["verified"]["same_bytes"], 8);
  EXPECT_EQ(result["verified"]["different_bytes"], 0);
  EXPECT_EQ(result["verified"]["agree_with_checkpoint"], 8);
  // Answered while it measured, in flight at its end (at most 4), and alone for verification (8).
  const double served = server_->Metric(kServed);
  EXPECT_GE(served, result["calls_ok"].get<double>() + 8);
  EXPECT_LE(served, result["calls_ok"].get<double>() + 8 + 4);
}

TEST_F(CliTest, StatusIsForOperatorsAndTellsOfEveryRank) {
  const FinishedProcess refused = Cli({"status", target_});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_EQ(refused.err,
            "expertmesh status: FAILED_PRECONDITION: the server at this address tells its status "
            "only if it is started with --allow_admin\n");
  server_.reset();
  server_ = ServerUnderTest::Start(
      {.checkpoint = checkpoint_, .args = {"--local_ranks=3", "--allow_admin"}});
  ASSERT_NE(server_, nullptr);
  target_ = absl::StrCat("--target=", server_->address());
  ASSERT_EQ(Cli({"forward", target_}).exit_code, 0);
  const FinishedProcess status = Cli({"status", "--json", target_});
  ASSERT_EQ(status.exit_code, 0) << status.err;
  const nlohmann::json answer = nlohmann::json::parse(status.out);
  EXPECT_EQ(answer["ranks"].size(), 3u);
  EXPECT_EQ(answer["num_steps"], "1");
  EXPECT_EQ(answer["num_requests_ok"], "1");
  const FinishedProcess text = Cli({"status", target_});
  EXPECT_TRUE(Has(text.out, "tiny: ready")) << text.out;
  EXPECT_TRUE(Has(text.out, "calls         1 answered, 0 failed")) << text.out;
}

TEST_F(CliTest, AWatchSeparatesItsFramesAndOutlivesTheServer) {
  server_ = ServerUnderTest::Start({.checkpoint = checkpoint_, .args = {"--allow_admin"}});
  ASSERT_NE(server_, nullptr);
  auto watch = ServerProcess::Start({.path = SiblingBinary("expertmesh"),
                                     .args = {"status", "--watch=50ms", "--max_attempts=1",
                                              absl::StrCat("--target=", server_->address())}});
  ASSERT_TRUE(watch.ok()) << watch.status();
  ASSERT_TRUE((*watch)->WaitForLine("^tiny: ready$", absl::Minutes(1)).ok());
  server_.reset();
  ASSERT_TRUE((*watch)->WaitForLine("^UNAVAILABLE: ", absl::Minutes(1)).ok());
  ASSERT_TRUE((*watch)->Terminate().ok()) << "it ended";
  EXPECT_EQ((*watch)->Wait(absl::Minutes(1)).value_or(0), -SIGTERM);
  const std::string out = (*watch)->Stdout();
  EXPECT_EQ(out.substr(0, 5), "---- ");
  EXPECT_TRUE(Has(out, "\n\n---- ")) << out;
  EXPECT_FALSE(Has(out, "\033")) << "no terminal";
}

TEST_F(CliTest, ErrorsReadLikeAdvice) {
  FinishedProcess result = Cli({"forward", "--layer=7", target_});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(Has(result.err, "has no experts; layers that do: 0, 1")) << result.err;
  result = Cli({"model", "--model=other", target_});
  EXPECT_TRUE(Has(result.err, "reason: MODEL_NOT_FOUND")) << result.err;
  EXPECT_TRUE(Has(result.err, "advice: `expertmesh model` lists")) << result.err;
  result = Cli({"forward", "--expected_fingerprint=00", target_});
  EXPECT_TRUE(Has(result.err, "reason: FINGERPRINT_MISMATCH")) << result.err;
  server_.reset();
  result = Cli({"model", "--max_attempts=1", target_});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(Has(result.err, "UNAVAILABLE")) << result.err;
  EXPECT_TRUE(Has(result.err, "is the server up")) << result.err;
}

TEST_F(CliTest, WhatOnlyTheServerKnowsExitsWithOne) {
  const struct {
    std::vector<std::string> flags;
    const char* says;
  } cases[] = {
      {{"forward", "--layer=7"}, "--layer=7 of model tiny has no experts"},
      {{"forward", "--output=y.npy"}, "NumPy has no bfloat16"},
      {{"forward", "--check=/no/such/checkpoint"}, "--check: file '/no/such/checkpoint"},
      {{"bench", "--check=/no/such/checkpoint"}, "--check: file '/no/such/checkpoint"},
      {{"forward", "--hidden=/no/such/file.npy"}, "--hidden: /no/such/file.npy cannot be read"},
      {{"forward", "--dtype=float32", "--output=/no/such/y.npy"}, "there is no folder /no/such"},
      {{"bench", "--layers=7"}, "layer 7 of model tiny has no experts"},
  };
  for (const auto& bad : cases) {
    std::vector<std::string> args = bad.flags;
    args.push_back(target_);
    const FinishedProcess result = Cli(args);
    EXPECT_EQ(result.exit_code, 1) << bad.says;
    EXPECT_TRUE(Has(result.err, bad.says)) << bad.says << "\n" << result.err;
  }
  // Nothing of it was sent.
  EXPECT_EQ(server_->Metric("expertmesh_steps_total"), 0);
}

TEST_F(CliTest, AnOutputThatCannotBeWrittenExitsWithOne) {
  const std::string full = directory_ + "/full.npy";
  std::filesystem::create_symlink("/dev/full", full);
  std::filesystem::create_directory(directory_ + "/folder.npy");
  std::filesystem::create_directory(directory_ + "/folder.safetensors");
  for (const char* name : {"folder.npy", "folder.safetensors"}) {
    const FinishedProcess result = Cli(
        {"forward", "--dtype=float32", absl::StrCat("--output=", directory_, "/", name), target_});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_TRUE(Has(result.err, absl::StrCat(name, ": is a folder"))) << result.err;
  }
  EXPECT_EQ(server_->Metric("expertmesh_steps_total"), 0);
  const FinishedProcess written =
      Cli({"forward", "--dtype=float32", absl::StrCat("--output=", full), target_});
  EXPECT_EQ(written.exit_code, 1);
  EXPECT_TRUE(Has(written.err, "full.npy: cannot be written: No space left")) << written.err;
  EXPECT_FALSE(Has(written.err, "wrote")) << written.err;
}

TEST_F(CliTest, AStandardOutputThatIsFullExitsWithOne) {
  server_ = ServerUnderTest::Start({.checkpoint = checkpoint_, .args = {"--allow_admin"}});
  ASSERT_NE(server_, nullptr);
  for (const char* command : {"model", "status", "status --json", "status --watch=10ms", "forward",
                              "forward --json", "explain", "bench --requests=2"}) {
    const FinishedProcess result =
        RunToEnd({.path = "/bin/sh",
                  .args = {"-c", absl::StrCat("exec ", SiblingBinary("expertmesh"), " ", command,
                                              " --target=", server_->address(), " > /dev/full")}});
    EXPECT_EQ(result.exit_code, 1) << command;
    EXPECT_TRUE(Has(result.err, "standard output cannot be written")) << command << result.err;
  }
}

TEST_F(CliTest, AMessageThatGrpcRefusesGetsTheFlagAndTheLimit) {
  server_ = ServerUnderTest::Start(
      {.checkpoint = checkpoint_, .args = {"--local_ranks=1", "--max_message_bytes=64KiB"}});
  ASSERT_NE(server_, nullptr);
  // Hidden states that fit alone, so that the command draws them, but not with their routing.
  const FinishedProcess result =
      Cli({"forward", "--tokens=680", absl::StrCat("--target=", server_->address())});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(Has(result.err, "RESOURCE_EXHAUSTED")) << result.err;
  EXPECT_TRUE(Has(result.err, "above the server's limit of 65536 (its flag --max_message_bytes)"))
      << result.err;
}

TEST_F(CliTest, FilesSayWhoRoutes) {
  const std::string logits = directory_ + "/logits.npy";
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 7), }";
  std::string bytes = std::string("\x93NUMPY\x01\x00", 8);
  bytes.push_back(static_cast<char>(header.size()));
  bytes.push_back('\0');
  bytes += header;
  for (int i = 0; i < 14; ++i) {
    const float value = static_cast<float>((i * 5) % 7);
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  std::ofstream(logits, std::ios::binary) << bytes;
  const FinishedProcess explain =
      Cli({"explain", "--tokens=2", absl::StrCat("--router_logits=", logits), "--json", target_});
  ASSERT_EQ(explain.exit_code, 0) << explain.err;
  const nlohmann::json answer = nlohmann::json::parse(explain.out);
  // Logits of token 0: 0 5 3 1 6 4 2; the top three are experts 4, 1 and 5.
  EXPECT_EQ(answer["tokens"][0]["experts"][0]["expert_id"], 4);
  EXPECT_EQ(answer["tokens"][0]["experts"][1]["expert_id"], 1);
  EXPECT_EQ(answer["tokens"][0]["experts"][2]["expert_id"], 5);
}

TEST(CliUsageTest, WrongWordsGetTheUsageAndExitTwo) {
  FinishedProcess result = Cli({});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_TRUE(Has(result.err, "usage: expertmesh <command>")) << result.err;
  result = Cli({"froward"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_TRUE(Has(result.err, "there is no command 'froward'")) << result.err;
  result = Cli({"help", "bench"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(Has(result.out, "--concurrency=N")) << result.out;
  for (const char* word : {"--help", "-h"}) {
    result = Cli({"bench", word});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_TRUE(Has(result.out, "--concurrency=N")) << result.out;
  }
  result = Cli({"help", "checkpoint"});
  EXPECT_TRUE(Has(result.out, "float32, float16, bfloat16 (the default) or float8_e4m3"))
      << result.out;
  result = Cli({"--version"});
  EXPECT_EQ(result.out.substr(0, 11), "expertmesh ");
}

// All of it without a server.
TEST(CliUsageTest, WrongFlagsExitWithTwoAndSayWhatIsValid) {
  const struct {
    std::vector<std::string> args;
    const char* says;
  } cases[] = {
      {{"checkpoint"}, "--out is missing"},
      {{"checkpoint", "--out=/no/such/folder", "--hidden_size=0"}, "hidden_size"},
      {{"checkpoint", "--out=x", "--weight_dtype=int8"},
       "it takes float32, float16, bfloat16 or float8_e4m3"},
      {{"checkpoint", "--out=x", "--architecture=Mine"},
       "architecture 'Mine' is unknown; known are"},
      {{"checkpoint", "--out=x", "--experts_per_token=17"},
       "--experts_per_token is 17; it takes 1 to --num_experts, which is 16"},
      {{"checkpoint", "--out=/tmp/none", "--num_experts=0"}, "num_experts"},
      {{"model", "--target="}, "--target is ''; expected host:port"},
      {{"status", "--target=here"}, "--target is 'here'; expected host:port or [v6]:port"},
      {{"bench", "--target=127.0.0.1:99999"}, "--target is '127.0.0.1:99999'; expected host:port"},
      {{"forward", "--router_logits=l.npy", "--topk_ids=i.npy", "--topk_weights=w.npy"},
       "both say who chooses the experts"},
      {{"forward", "--topk_ids=i.npy"}, "--topk_ids and --topk_weights: give both or none"},
      {{"forward", "--routing=gate", "--topk_ids=i.npy", "--topk_weights=w.npy"},
       "--routing=gate does not read --topk_ids"},
      {{"forward", "--routing=topk", "--router_logits=l.npy"},
       "--routing=topk does not read --router_logits"},
      {{"forward", "--routing=mine"}, "--routing is 'mine'; it takes topk, logits or gate"},
      {{"forward", "--layer=-2"}, "--layer is -2; it takes a whole number from -1 on"},
      {{"forward", "--topk=-1"}, "--topk is -1; it takes a whole number from 0 on"},
      {{"explain", "--tokens=-1"}, "--tokens is -1; it takes a whole number from 0 on"},
      {{"explain", "--tokens=many"}, "--tokens is 'many'; it takes a whole number"},
      {{"forward", "--dtype=int8"}, "--dtype is 'int8'; it takes float32, float16 or bfloat16"},
      {{"forward", "--combine=some"}, "--combine is 'some'; it takes per_owner, per_expert"},
      {{"forward", "--timeout=5"},
       "--timeout is '5'; it takes a duration with its unit, e.g. 500ms, 10s or 2m"},
      {{"forward", "--timeout=-1s"}, "--timeout is -1s; it takes more than 0"},
      {{"model", "--max_attempts=0"}, "--max_attempts is 0; it takes at least 1"},
      {{"model", "--tls_cert=c.pem"}, "--tls_cert and --tls_key: give both or none"},
      {{"model", "--tls_cert=c.pem", "--tls_key=k.pem"}, "--tls_cert needs --tls_ca"},
      {{"model", "--tokens=3"}, "--tokens is a flag of other commands"},
      {{"model", "--targt=x:1"}, "there is no flag --targt; did you mean --target?"},
      {{"model", "tiny"}, "'tiny' is one word too many"},
      {{"status", "--watch=-2s"}, "--watch is -2s"},
      {{"status", "--watch=2"}, "--watch is '2'; it takes a duration with its unit"},
      {{"bench", "--samples=-1"}, "--samples is -1; it takes a number from 0 on"},
      {{"bench", "--tokens=0"}, "--tokens is 0; it takes a number from 1 on"},
      {{"bench", "--duration=0"}, "--duration is 0"},
      {{"bench", "--skew=much"}, "--skew is 'much'; it takes uniform, zipf or one_hot"},
      {{"bench", "--layers=a"}, "'a' is no number"},
      {{"bench", "--concurrency=100000"}, "at most 16384 calls in flight"},
      {{"forward", "--tokens=8", "--hidden=h.npy"},
       "--tokens would do nothing: the hidden states are those of --hidden"},
      {{"explain", "--hidden=h.npy", "--dtype=float32"}, "--dtype would do nothing"},
      {{"forward", "--routing=gate", "--topk=3"},
       "--topk would do nothing: the server chooses the experts"},
      {{"explain", "--routing=logits", "--topk=3"}, "--topk would do nothing"},
      {{"forward", "--router_logits=l.npy", "--topk=3"}, "--topk would do nothing"},
      {{"forward", "--topk_ids=i.npy", "--topk_weights=w.npy", "--topk=3"},
       "--topk would do nothing: each token's experts are those of --topk_ids"},
      {{"forward", "--hidden=h.npy", "--routing=gate", "--seed=2"},
       "--seed would do nothing: nothing is drawn at random"},
      {{"bench", "--rate=100", "--concurrency=4"},
       "--concurrency would do nothing: with --rate calls start at random moments"},
      {{"forward", "--output=y.txt"}, "--output: y.txt: must end with .npy or .safetensors"},
      {{"forward", "--output=y.npy", "--output_dtype=bfloat16"}, "--output: y.npy: NumPy has no"},
      {{"forward", "--output=y.npy", "--dtype=bfloat16"}, "--output: y.npy: NumPy has no bfloat16"},
      {{"forward", "--hidden=x.txt"}, "--hidden: x.txt: must end with .npy"},
      {{"explain", "--router_logits=x.txt"}, "--router_logits: x.txt: must end with .npy"},
      {{"bench", "--rate=0"}, "--rate is 0; it takes a number of calls a second above 0"},
      {{"bench", "--rate=inf"}, "--rate is inf"},
      {{"bench", "--samples=0", "--check=c"}, "--check would do nothing: with --samples=0"},
  };
  for (const auto& bad : cases) {
    const FinishedProcess result = Cli(bad.args);
    EXPECT_EQ(result.exit_code, 2) << bad.says << "\n" << result.err;
    EXPECT_TRUE(Has(result.err, bad.says)) << bad.says << "\n" << result.err;
    EXPECT_TRUE(Has(result.err, "\nsee expertmesh help")) << result.err;
    EXPECT_EQ(result.out, "");
  }
  const FinishedProcess large =
      Cli({"checkpoint", "--out=/tmp/none", "--hidden_size=1048576", "--num_experts=65536",
           "--num_layers=100", "--intermediate_size=1000000"});
  EXPECT_EQ(large.exit_code, 1);
  EXPECT_TRUE(Has(large.err, "of this checkpoint take")) << large.err;
}

}  // namespace
}  // namespace expertmesh
