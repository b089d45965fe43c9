// Ranks as processes: the bytes of one process, refusals, and what a client sees when ranks and the
// control plane die, stop and come back.

#include "tests/integration/rank_cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/dtype.h"
#include "tests/integration/process_usage.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

constexpr char kCheckpoint[] = "tests/golden/qwen3_moe_bfloat16";
constexpr absl::Duration kPlenty = absl::Seconds(60);
// Short, for tests that wait until a silent rank is lost; instrumented processes take longer to say
// their first word.
constexpr int kHeartbeatTimeoutMillis = kResidentBytesMeanSomething ? 500 : 3000;

// Else small steps go without a communicator.
constexpr char kExchange[] = "--dispatch=all_to_all";

std::string HeartbeatFlag() {
  return absl::StrCat("--heartbeat_timeout=", kHeartbeatTimeoutMillis, "ms");
}

v1::ForwardRequest RandomRequest(const v1::GetModelResponse& model, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const v1::LayerInfo& layer = model.layers(static_cast<int>(random() % model.layers_size()));
  const int64_t num_tokens = static_cast<int64_t>(random() % 60);
  const int32_t topk = 1 + static_cast<int32_t>(random() % 6);
  v1::ForwardRequest request;
  request.set_layer(layer.index());
  v1::Tensor* hidden = request.mutable_hidden_states();
  hidden->set_dtype(v1::DATA_TYPE_BFLOAT16);
  hidden->add_shape(num_tokens);
  hidden->add_shape(model.hidden_size());
  hidden->mutable_data()->resize(2 * num_tokens * model.hidden_size());
  for (int64_t i = 0; i < num_tokens * model.hidden_size(); ++i) {
    StoreFloat(hidden->mutable_data()->data(), DType::kBFloat16, i, normal(random));
  }
  request.mutable_topk()->set_topk(topk);
  for (int64_t i = 0; i < num_tokens * topk; ++i) {
    request.mutable_topk()->add_ids(static_cast<int32_t>(random() % (layer.num_experts() + 1)) - 1);
    request.mutable_topk()->add_weights(normal(random));
  }
  request.set_apply_router_weight_on_input(random() % 4 == 0);
  if (random() % 3 == 0) request.mutable_options()->set_combine(v1::COMBINE_PER_EXPERT);
  return request;
}

// What one process with as many ranks inside answers.
class Oracle {
 public:
  explicit Oracle(int32_t num_ranks)
      : server_(ServerUnderTest::Start(
            {.checkpoint = kCheckpoint, .args = {absl::StrCat("--local_ranks=", num_ranks)}})) {
    if (server_ == nullptr) return;
    const auto described = server_->GetModel("");
    EXPECT_TRUE(described.ok()) << described.status();
    if (described.ok()) model = *described;
  }
  bool ok() const { return server_ != nullptr && model.layers_size() > 0; }
  std::string Answer(const v1::ForwardRequest& request) {
    const CallOutcome outcome = server_->Forward(request);
    EXPECT_TRUE(outcome.ok()) << outcome;
    return outcome.response.output().data();
  }

  v1::GetModelResponse model;

 private:
  std::unique_ptr<ServerUnderTest> server_;
};

TEST(RankClusterTest, BytesAreThoseOfOneProcess) {
  for (const int32_t num_ranks : {1, 2, 3}) {
    SCOPED_TRACE(absl::StrCat(num_ranks, " ranks"));
    Oracle oracle(num_ranks);
    ASSERT_TRUE(oracle.ok());
    const auto cluster =
        RankCluster::Start({.checkpoint = kCheckpoint,
                            .ep_size = num_ranks,
                            .control_args = {"--allow_dispatch_option", "--max_num_tokens=7"}});
    ASSERT_NE(cluster, nullptr);
    EXPECT_EQ(cluster->control().Health(""), "SERVING");
    constexpr v1::DispatchMode kModes[] = {v1::DISPATCH_MODE_AUTO, v1::DISPATCH_MODE_ALL_TO_ALL,
                                           v1::DISPATCH_MODE_ALL_TO_ALL_FIXED_CAPACITY,
                                           v1::DISPATCH_MODE_ALLGATHER_REDUCESCATTER,
                                           v1::DISPATCH_MODE_DIRECT};
    for (uint64_t seed = 0; seed < 40; ++seed) {
      SCOPED_TRACE(absl::StrCat("seed ", seed));
      v1::ForwardRequest request = RandomRequest(oracle.model, seed);
      const std::string answer = oracle.Answer(request);
      for (const v1::DispatchMode mode : kModes) {
        SCOPED_TRACE(v1::DispatchMode_Name(mode));
        request.mutable_options()->set_dispatch(mode);
        const CallOutcome outcome = cluster->control().Forward(request);
        ASSERT_TRUE(outcome.ok()) << outcome;
        ASSERT_EQ(outcome.response.output().data(), answer);
        EXPECT_EQ(outcome.response.served_by().ep_size(), num_ranks);
        if (mode != v1::DISPATCH_MODE_AUTO && outcome.response.output().shape(0) > 0) {
          EXPECT_EQ(outcome.response.served_by().strategy(), mode);
        }
      }
    }
    ASSERT_FALSE(HasFailure());
  }
}

TEST(RankClusterTest, RefusedRanksSayWhyAndTheGroupIsUnharmed) {
  const auto cluster = RankCluster::Start({.checkpoint = kCheckpoint, .ep_size = 2});
  ASSERT_NE(cluster, nullptr);
  struct Case {
    std::vector<std::string> args;
    std::string reason;
  };
  const std::string checkpoint = absl::StrCat("--checkpoint=", kCheckpoint);
  const std::vector<Case> cases = {
      {{checkpoint, "--ep_rank=1", "--ep_size=2", "--join_timeout=300ms"}, "rank 1 is taken"},
      {{checkpoint, "--ep_rank=2", "--ep_size=3"}, "started for 3 ranks, this group has 2"},
      {{"--checkpoint=tests/golden/qwen3_moe_float32", "--ep_rank=1", "--ep_size=2",
        "--model_name=qwen3_moe_bfloat16"},
       "fingerprint"},
      {{"--checkpoint=tests/golden/olmoe", "--ep_rank=1", "--ep_size=2"},
       "does not hold model qwen3_moe_bfloat16"},
      {{checkpoint, "--ep_rank=1", "--ep_size=2", "--listen=nowhere", "--join_timeout=300ms"},
       "rank 1 is taken"},
  };
  for (const Case& c : cases) {
    const auto stranger = cluster->StartExpertServer(c.args);
    ASSERT_NE(stranger, nullptr);
    const auto exit_code = stranger->Wait(kPlenty);
    ASSERT_TRUE(exit_code.ok()) << exit_code.status();
    EXPECT_EQ(*exit_code, 1);
    EXPECT_THAT(stranger->Stderr(), HasSubstr(c.reason));
  }
  EXPECT_TRUE(cluster->WaitForEpoch(1));
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(model->epoch(), 1u);
  EXPECT_TRUE(cluster->control().Forward(RandomRequest(*model, 1)).ok());

  // Nobody there: the end comes in time, and says so.
  auto lonely =
      ServerProcess::Start({.path = SiblingBinary("expertmesh-expert-server"),
                            .args = {checkpoint, "--ep_rank=0", "--ep_size=1",
                                     "--control_plane=127.0.0.1:1", "--join_timeout=500ms"}});
  ASSERT_TRUE(lonely.ok());
  const auto exit_code = (*lonely)->Wait(kPlenty);
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 1);
  EXPECT_THAT((*lonely)->Stderr(), HasSubstr("could not join at 127.0.0.1:1 in 500ms"));
}

// Callers that never rest. Each call must end OK with the right bytes, or UNAVAILABLE, in time.
class Load {
 public:
  Load(RankCluster* cluster, Oracle* oracle, uint64_t seed) : cluster_(cluster) {
    for (uint64_t i = 0; i < 16; ++i) {
      requests_.push_back(RandomRequest(oracle->model, seed * 100 + i));
      answers_.push_back(oracle->Answer(requests_.back()));
    }
    for (int i = 0; i < 3; ++i) threads_.emplace_back([this, i] { Run(i); });
  }
  ~Load() { Stop(); }
  void Stop() {
    stopping_ = true;
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  int64_t num_ok() const { return num_ok_; }
  int64_t num_unavailable() const { return num_unavailable_; }
  // Until so many more calls have been answered.
  bool WaitForAnswers(int64_t count) const {
    const int64_t wanted = num_ok_ + count;
    const absl::Time deadline = absl::Now() + kPlenty;
    while (num_ok_ < wanted && absl::Now() < deadline) std::this_thread::yield();
    return num_ok_ >= wanted;
  }

 private:
  // A stopped rank is noticed, and its step lost, well within it.
  static constexpr absl::Duration kTimeout = absl::Milliseconds(4 * kHeartbeatTimeoutMillis);

  void Run(size_t first) {
    for (size_t i = first; !stopping_; ++i) {
      const size_t which = i % requests_.size();
      const absl::Time start = absl::Now();
      const CallOutcome outcome = cluster_->control().Forward(requests_[which], kTimeout);
      const absl::Duration took = absl::Now() - start;
      if (outcome.ok()) {
        EXPECT_EQ(outcome.response.output().data(), answers_[which]);
        ++num_ok_;
      } else {
        EXPECT_EQ(outcome.code, absl::StatusCode::kUnavailable) << outcome;
        EXPECT_THAT(outcome.reason, ::testing::AnyOf("NO_EPOCH", "STEP_LOST")) << outcome;
        ++num_unavailable_;
      }
      EXPECT_LT(took, kTimeout + absl::Milliseconds(500));
    }
  }

  RankCluster* const cluster_;
  std::vector<v1::ForwardRequest> requests_;
  std::vector<std::string> answers_;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> num_ok_{0};
  std::atomic<int64_t> num_unavailable_{0};
  std::vector<std::thread> threads_;
};

TEST(RankClusterTest, KilledRanksAreReplacedUnderLoad) {
  constexpr uint64_t kSeed = 20;
  SCOPED_TRACE(absl::StrCat("seed ", kSeed));
  std::mt19937_64 random(kSeed);
  Oracle oracle(3);
  ASSERT_TRUE(oracle.ok());
  const auto cluster = RankCluster::Start(
      {.checkpoint = kCheckpoint, .ep_size = 3, .control_args = {"--lanes=3", kExchange}});
  ASSERT_NE(cluster, nullptr);
  Load load(cluster.get(), &oracle, kSeed);
  for (uint64_t epoch = 2; epoch <= 7; ++epoch) {
    ASSERT_TRUE(load.WaitForAnswers(1 + static_cast<int64_t>(random() % 100)));
    const auto victim = static_cast<int32_t>(random() % 3);
    ASSERT_TRUE(cluster->rank(victim).Kill().ok());
    ASSERT_TRUE(cluster->StartRank(victim));
    ASSERT_TRUE(cluster->WaitForEpoch(epoch));
  }
  EXPECT_TRUE(load.WaitForAnswers(100));
  load.Stop();
  RecordProperty("ok", static_cast<int>(load.num_ok()));
  RecordProperty("unavailable", static_cast<int>(load.num_unavailable()));
}

TEST(RankClusterTest, AStoppedRankIsLostByItsHeartbeatAndComesBack) {
  Oracle oracle(2);
  ASSERT_TRUE(oracle.ok());
  const auto cluster = RankCluster::Start(
      {.checkpoint = kCheckpoint, .ep_size = 2, .control_args = {HeartbeatFlag()}});
  ASSERT_NE(cluster, nullptr);
  Load load(cluster.get(), &oracle, 7);
  ASSERT_TRUE(load.WaitForAnswers(10));
  ASSERT_TRUE(cluster->rank(1).Signal(SIGSTOP).ok());
  ASSERT_TRUE(cluster->control()
                  .process()
                  .WaitForLine("a rank was lost ep_rank=1.*heartbeat", kPlenty)
                  .ok());
  EXPECT_TRUE(cluster->control().process().WaitForLine("an epoch ended epoch=1", kPlenty).ok());
  ASSERT_TRUE(cluster->rank(1).Signal(SIGCONT).ok());
  ASSERT_TRUE(cluster->WaitForEpoch(2));
  EXPECT_TRUE(load.WaitForAnswers(50));
}

// Kills, stops that end before or after anybody noticed, and departures, in random order.
TEST(RankClusterTest, RandomWeatherUnderLoad) {
  constexpr uint64_t kSeed = 31;
  SCOPED_TRACE(absl::StrCat("seed ", kSeed));
  std::mt19937_64 random(kSeed);
  Oracle oracle(3);
  ASSERT_TRUE(oracle.ok());
  const auto cluster = RankCluster::Start(
      {.checkpoint = kCheckpoint, .ep_size = 3, .control_args = {HeartbeatFlag(), kExchange}});
  ASSERT_NE(cluster, nullptr);
  Load load(cluster.get(), &oracle, kSeed);
  for (int i = 0; i < 12; ++i) {
    SCOPED_TRACE(absl::StrCat("event ", i));
    const auto victim = static_cast<int32_t>(random() % 3);
    switch (random() % 3) {
      case 0:
        ASSERT_TRUE(cluster->rank(victim).Kill().ok());
        ASSERT_TRUE(cluster->StartRank(victim));
        break;
      case 1:
        ASSERT_TRUE(cluster->rank(victim).Terminate().ok());
        ASSERT_TRUE(cluster->StartRank(victim));
        break;
      default: {
        ASSERT_TRUE(cluster->rank(victim).Signal(SIGSTOP).ok());
        // About as long as the time after which it is lost: both ends of the race.
        const absl::Time until =
            absl::Now() + absl::Milliseconds(100 + random() % (kHeartbeatTimeoutMillis + 200));
        while (absl::Now() < until) std::this_thread::yield();
        ASSERT_TRUE(cluster->rank(victim).Signal(SIGCONT).ok());
      }
    }
    ASSERT_TRUE(load.WaitForAnswers(1 + static_cast<int64_t>(random() % 50)));
  }
}

TEST(RankClusterTest, EpochsLeaveNothingBehind) {
  const auto cluster = RankCluster::Start({.checkpoint = kCheckpoint, .ep_size = 2});
  ASSERT_NE(cluster, nullptr);
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  const pid_t pids[] = {cluster->control().process().pid(), cluster->rank(0).pid()};
  const auto cycle = [&](uint64_t epoch) {
    ASSERT_TRUE(cluster->rank(1).Kill().ok());
    ASSERT_TRUE(cluster->StartRank(1));
    ASSERT_TRUE(cluster->WaitForEpoch(epoch));
    ASSERT_TRUE(cluster->control().Forward(RandomRequest(*model, epoch)).ok());
  };
  uint64_t epoch = 1;
  while (epoch < 10) ASSERT_NO_FATAL_FAILURE(cycle(++epoch));
  const ProcessUsage before[] = {UsageOf(pids[0]), UsageOf(pids[1])};
  while (epoch < 110) ASSERT_NO_FATAL_FAILURE(cycle(++epoch));
  for (int i = 0; i < 2; ++i) {
    SCOPED_TRACE(i == 0 ? "control plane" : "rank 0");
    // gRPC closes what it does not need some time later, and keeps a few threads more or less.
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    ProcessUsage after = UsageOf(pids[i]);
    while (after.num_fds > before[i].num_fds + 2 && absl::Now() < deadline) {
      after = UsageOf(pids[i]);
    }
    EXPECT_LE(after.num_fds, before[i].num_fds + 2) << before[i] << " " << after;
    EXPECT_LE(after.num_threads, before[i].num_threads + 4) << before[i] << " " << after;
    if (kResidentBytesMeanSomething) {
      EXPECT_LE(after.resident_bytes, before[i].resident_bytes + (4 << 20))
          << before[i] << " " << after;
    }
  }
}

TEST(RankClusterTest, LocalClusterScript) {
  const std::string cli = SiblingBinary("expertmesh");
  auto script = ServerProcess::Start(
      {.path = "deploy/local_cluster.sh",
       .args = {"3", "--listen", "127.0.0.1:0", "--bin", cli.substr(0, cli.rfind('/'))}});
  ASSERT_TRUE(script.ok()) << script.status();
  // It ends what it started; killed, it could not.
  struct Stop {
    ServerProcess* script;
    ~Stop() {
      script->Terminate().IgnoreError();
      EXPECT_EQ(script->Wait(kPlenty).value_or(-1), 0);
    }
  } stop{script->get()};
  const auto serving =
      (*script)->WaitForLine("serving tiny-qwen3-moe on (127\\.0\\.0\\.1:[0-9]+) epoch=1", kPlenty);
  ASSERT_TRUE(serving.ok()) << serving.status();
  const auto folder = (*script)->WaitForLine("^(/.*/tiny-qwen3-moe): ", kPlenty);
  ASSERT_TRUE(folder.ok()) << folder.status();
  auto forward = ServerProcess::Start(
      {.path = cli,
       .args = {"forward", "--tokens=9", absl::StrCat("--target=", (*serving)[1]),
                absl::StrCat("--check=", (*folder)[1])}});
  ASSERT_TRUE(forward.ok()) << forward.status();
  EXPECT_EQ((*forward)->Wait(kPlenty).value_or(-1), 0) << (*forward)->Stderr();
  EXPECT_THAT((*forward)->Stdout(), HasSubstr("3 ranks"));
}

TEST(RankClusterTest, RanksKeepTheirWeightsAcrossARestartOfTheControlPlane) {
  Oracle oracle(2);
  ASSERT_TRUE(oracle.ok());
  const auto cluster = RankCluster::Start({.checkpoint = kCheckpoint, .ep_size = 2});
  ASSERT_NE(cluster, nullptr);
  const uint64_t old_incarnation = cluster->control().GetModel("")->incarnation();
  ASSERT_TRUE(cluster->RestartControl());
  ASSERT_TRUE(cluster->WaitForEpoch(1));
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  EXPECT_NE(model->incarnation(), old_incarnation);
  const v1::ForwardRequest request = RandomRequest(*model, 3);
  const CallOutcome outcome = cluster->control().Forward(request);
  ASSERT_TRUE(outcome.ok()) << outcome;
  EXPECT_EQ(outcome.response.output().data(), oracle.Answer(request));
  for (int32_t rank = 0; rank < 2; ++rank) {
    const std::string log = cluster->rank(rank).Stderr();
    EXPECT_EQ(log.find("opened a checkpoint"), log.rfind("opened a checkpoint"));
    EXPECT_NE(log.find("joined the group"), log.rfind("joined the group"));
  }
}

TEST(RankClusterTest, ARankLeavesAndReadinessFollowsTheEpoch) {
  const auto cluster = RankCluster::Start({.checkpoint = kCheckpoint, .ep_size = 2});
  ASSERT_NE(cluster, nullptr);
  ASSERT_TRUE(cluster->rank(0).Terminate().ok());
  const auto exit_code = cluster->rank(0).Wait(kPlenty);
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 0);
  ASSERT_TRUE(cluster->control().process().WaitForLine("an epoch ended epoch=1", kPlenty).ok());
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  EXPECT_FALSE(model->ready());
  const CallOutcome refused =
      cluster->control().Forward(RandomRequest(*model, 1), absl::Milliseconds(300));
  EXPECT_EQ(refused.code, absl::StatusCode::kUnavailable) << refused;
  EXPECT_EQ(refused.reason, "NO_EPOCH");
  EXPECT_EQ(cluster->control().Health(""), "NOT_SERVING");
  ASSERT_TRUE(cluster->StartRank(0));
  ASSERT_TRUE(cluster->WaitForEpoch(2));
  EXPECT_TRUE(cluster->control().Forward(RandomRequest(*model, 1)).ok());
  EXPECT_EQ(cluster->control().Health(""), "SERVING");
}

}  // namespace
}  // namespace expertmesh
