// What clients see when ranks and the control plane die, stop and come back, and what that leaves
// behind.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/integration/process_usage.h"
#include "tests/integration/rank_cluster.h"
#include "tests/integration/rank_load.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

// Else small steps go without a communicator.
constexpr char kExchange[] = "--dispatch=all_to_all";

TEST(RankWeatherTest, KilledRanksAreReplacedUnderLoad) {
  constexpr uint64_t kSeed = 20;
  SCOPED_TRACE(absl::StrCat("seed ", kSeed));
  std::mt19937_64 random(kSeed);
  Oracle oracle(3);
  ASSERT_TRUE(oracle.ok());
  const auto cluster = RankCluster::Start(
      {.checkpoint = kRankCheckpoint, .ep_size = 3, .control_args = {"--lanes=3", kExchange}});
  ASSERT_NE(cluster, nullptr);
  RankLoad load(cluster.get(), &oracle, kSeed);
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

TEST(RankWeatherTest, AStoppedRankIsLostByItsHeartbeatAndComesBack) {
  Oracle oracle(2);
  ASSERT_TRUE(oracle.ok());
  const auto cluster = RankCluster::Start(
      {.checkpoint = kRankCheckpoint, .ep_size = 2, .control_args = {HeartbeatFlag()}});
  ASSERT_NE(cluster, nullptr);
  RankLoad load(cluster.get(), &oracle, 7);
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

// Its heartbeats are not what tells: steps that follow each other without a pause must not put off
// the moment at which one of them has taken too long.
TEST(RankWeatherTest, AStoppedRankIsLostByItsStepHoweverBusyTheLanesWere) {
  Oracle oracle(2);
  ASSERT_TRUE(oracle.ok());
  const auto cluster = RankCluster::Start(
      {.checkpoint = kRankCheckpoint,
       .ep_size = 2,
       .control_args = {"--heartbeat_timeout=10m", "--step_timeout=2s", "--max_step_tokens=16"}});
  ASSERT_NE(cluster, nullptr);
  RankLoad load(cluster.get(), &oracle, 9, {.num_callers = 16, .timeout = kPlenty});
  ASSERT_TRUE(load.WaitForAnswers(300));
  ASSERT_TRUE(cluster->rank(1).Signal(SIGSTOP).ok());
  EXPECT_TRUE(cluster->control().process().WaitForLine("an epoch ended epoch=1", kPlenty).ok());
  ASSERT_TRUE(cluster->rank(1).Signal(SIGCONT).ok());
  ASSERT_TRUE(cluster->WaitForEpoch(2));
  EXPECT_TRUE(load.WaitForAnswers(50));
}

// Kills, stops that end before or after anybody noticed, and departures, in random order.
TEST(RankWeatherTest, RandomWeatherUnderLoad) {
  constexpr uint64_t kSeed = 31;
  SCOPED_TRACE(absl::StrCat("seed ", kSeed));
  std::mt19937_64 random(kSeed);
  Oracle oracle(3);
  ASSERT_TRUE(oracle.ok());
  const auto cluster = RankCluster::Start(
      {.checkpoint = kRankCheckpoint, .ep_size = 3, .control_args = {HeartbeatFlag(), kExchange}});
  ASSERT_NE(cluster, nullptr);
  RankLoad load(cluster.get(), &oracle, kSeed);
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

// The same, with a control plane that is killed and started again among it. Which epoch then stands
// nobody counts: what matters is that answers come again.
TEST(RankWeatherTest, TheControlPlaneDiesToo) {
  constexpr uint64_t kSeed = 47;
  SCOPED_TRACE(absl::StrCat("seed ", kSeed));
  std::mt19937_64 random(kSeed);
  Oracle oracle(3);
  ASSERT_TRUE(oracle.ok());
  const auto cluster = RankCluster::Start(
      {.checkpoint = kRankCheckpoint, .ep_size = 3, .control_args = {HeartbeatFlag(), kExchange}});
  ASSERT_NE(cluster, nullptr);
  RankLoad load(cluster.get(), &oracle, kSeed, {.control_may_die = true});
  for (int i = 0; i < 12; ++i) {
    SCOPED_TRACE(absl::StrCat("event ", i));
    const auto victim = static_cast<int32_t>(random() % 3);
    switch (random() % 4) {
      case 0:
        ASSERT_TRUE(cluster->rank(victim).Kill().ok());
        ASSERT_TRUE(cluster->StartRank(victim));
        break;
      case 1:
        // A rank that nobody can tell that its control plane is another one.
        ASSERT_TRUE(cluster->rank(victim).Signal(SIGSTOP).ok());
        ASSERT_TRUE(cluster->RestartControl());
        ASSERT_TRUE(cluster->rank(victim).Signal(SIGCONT).ok());
        break;
      case 2:
        ASSERT_TRUE(cluster->rank(victim).Kill().ok());
        ASSERT_TRUE(cluster->RestartControl());
        ASSERT_TRUE(cluster->StartRank(victim));
        break;
      default:
        ASSERT_TRUE(cluster->RestartControl());
    }
    ASSERT_TRUE(load.WaitForAnswers(1 + static_cast<int64_t>(random() % 50)));
  }
  load.Stop();
  RecordProperty("ok", static_cast<int>(load.num_ok()));
  RecordProperty("unavailable", static_cast<int>(load.num_unavailable()));
}

// gRPC closes what it does not need some time later, and keeps a few threads more or less.
void ExpectNothingLeft(pid_t pid, const ProcessUsage& before) {
  const absl::Time deadline = absl::Now() + kPlenty;
  ProcessUsage after = UsageOf(pid);
  while ((after.num_fds > before.num_fds + 2 || after.num_threads > before.num_threads + 4) &&
         absl::Now() < deadline) {
    after = UsageOf(pid);
  }
  EXPECT_LE(after.num_fds, before.num_fds + 2) << before << " " << after;
  EXPECT_LE(after.num_threads, before.num_threads + 4) << before << " " << after;
  if (kResidentBytesMeanSomething) {
    EXPECT_LE(after.resident_bytes, before.resident_bytes + (4 << 20)) << before << " " << after;
  }
}

// Instrumented processes start and end slowly.
constexpr uint64_t kNumCycles = kResidentBytesMeanSomething ? 100 : 20;

TEST(RankWeatherTest, EpochsLeaveNothingBehind) {
  const auto cluster = RankCluster::Start({.checkpoint = kRankCheckpoint, .ep_size = 2});
  ASSERT_NE(cluster, nullptr);
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  const auto cycle = [&](uint64_t epoch) {
    ASSERT_TRUE(cluster->rank(1).Kill().ok());
    ASSERT_TRUE(cluster->StartRank(1));
    ASSERT_TRUE(cluster->WaitForEpoch(epoch));
    ASSERT_TRUE(cluster->control().Forward(RandomRequest(*model, epoch)).ok());
  };
  uint64_t epoch = 1;
  while (epoch < 10) ASSERT_NO_FATAL_FAILURE(cycle(++epoch));
  const pid_t control = cluster->control().process().pid();
  const pid_t rank = cluster->rank(0).pid();
  const ProcessUsage control_before = UsageOf(control);
  const ProcessUsage rank_before = UsageOf(rank);
  while (epoch < 10 + kNumCycles) ASSERT_NO_FATAL_FAILURE(cycle(++epoch));
  {
    SCOPED_TRACE("control plane");
    ExpectNothingLeft(control, control_before);
  }
  SCOPED_TRACE("rank 0");
  ExpectNothingLeft(rank, rank_before);
}

TEST(RankWeatherTest, ControlPlanesThatDieLeaveNothingBehindInRanks) {
  const auto cluster = RankCluster::Start({.checkpoint = kRankCheckpoint, .ep_size = 2});
  ASSERT_NE(cluster, nullptr);
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  const auto cycle = [&](uint64_t seed) {
    ASSERT_TRUE(cluster->RestartControl());
    ASSERT_TRUE(cluster->WaitForEpoch(1));
    ASSERT_TRUE(cluster->control().Forward(RandomRequest(*model, seed)).ok());
  };
  for (uint64_t i = 0; i < 10; ++i) ASSERT_NO_FATAL_FAILURE(cycle(i));
  std::vector<ProcessUsage> before;
  for (int32_t rank = 0; rank < 2; ++rank) before.push_back(UsageOf(cluster->rank(rank).pid()));
  for (uint64_t i = 0; i < kNumCycles; ++i) ASSERT_NO_FATAL_FAILURE(cycle(i));
  for (int32_t rank = 0; rank < 2; ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    ExpectNothingLeft(cluster->rank(rank).pid(), before[rank]);
    // It is the one that was started in the beginning, with the weights that it read then.
    const std::string log = cluster->rank(rank).Stderr();
    EXPECT_EQ(log.find("opened a checkpoint"), log.rfind("opened a checkpoint"));
  }
}

}  // namespace
}  // namespace expertmesh
