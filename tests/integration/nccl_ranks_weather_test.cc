// What clients and operators see when ranks that exchange rows by NCCL's interface die, hang, stop
// and come back.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/nccl_cluster.h"
#include "tests/integration/rank_cluster.h"
#include "tests/integration/rank_load.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// With what makes steps exchange rows, and overlap.
RankCluster::Options Group(int32_t ep_size) {
  RankCluster::Options options = NcclCluster(ep_size, kRankCheckpoint);
  options.control_args = {"--dispatch=all_to_all", "--lanes=2", "--max_step_tokens=16"};
  return options;
}

// Nobody may have called NCCL as real code must not.
void ExpectNoMisuse(RankCluster& cluster, int32_t ep_size) {
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    EXPECT_THAT(cluster.rank(rank).Stderr(), Not(HasSubstr("misused")));
  }
}

// Whether NCCL notices that a peer is gone, or (as over NVLink) does not.
class NcclRanksWeatherTest : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Peers, NcclRanksWeatherTest, testing::Values("", "silent_peers"),
                         [](const auto& test) {
                           return *test.param == '\0' ? "TellOfTheirEnd" : "EndSilently";
                         });

TEST_P(NcclRanksWeatherTest, KilledRanksAreReplacedUnderLoad) {
  constexpr uint64_t kSeed = 20;
  SCOPED_TRACE(absl::StrCat("seed ", kSeed));
  std::mt19937_64 random(kSeed);
  Oracle oracle(3, GpuInOneProcess(kRankCheckpoint));
  ASSERT_TRUE(oracle.ok());
  RankCluster::Options options = Group(3);
  options.rank_environment = {absl::StrCat("NCCL_OVER_SOCKETS=", GetParam())};
  const auto cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  RankLoad load(cluster.get(), &oracle, kSeed, {.num_callers = 4, .timeout = kPlenty});
  for (uint64_t epoch = 2; epoch <= 4; ++epoch) {
    ASSERT_TRUE(load.WaitForAnswers(1 + static_cast<int64_t>(random() % 10)));
    const auto victim = static_cast<int32_t>(random() % 3);
    ASSERT_TRUE(cluster->rank(victim).Kill().ok());
    ASSERT_TRUE(cluster->StartRank(victim));
    ASSERT_TRUE(cluster->WaitForEpoch(epoch));
  }
  EXPECT_TRUE(load.WaitForAnswers(10));
  load.Stop();
  // Nobody was out of time, so nobody's call failed.
  EXPECT_EQ(load.num_unavailable(), 0);
  ExpectNoMisuse(*cluster, 3);
}

TEST_P(NcclRanksWeatherTest, WithoutTheRankCallsEndUnavailable) {
  RankCluster::Options options = Group(2);
  options.rank_environment = {absl::StrCat("NCCL_OVER_SOCKETS=", GetParam())};
  const auto cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok());
  const v1::ForwardRequest request = RandomRequest(*model, 4);
  const CallOutcome first = cluster->control().Forward(request);
  ASSERT_TRUE(first.ok()) << first;
  ASSERT_TRUE(cluster->rank(1).Kill().ok());
  ASSERT_TRUE(cluster->rank(1).Wait(kPlenty).ok());
  ASSERT_TRUE(cluster->control().process().WaitForLine("an epoch ended epoch=1", kPlenty).ok());
  // The answer sets out 50 ms before the deadline, which a busy machine may take.
  CallOutcome refused;
  for (int i = 0; i < 20 && refused.code != absl::StatusCode::kUnavailable; ++i) {
    refused = cluster->control().Forward(request, absl::Seconds(1));
    ASSERT_FALSE(refused.ok());
  }
  EXPECT_EQ(refused.code, absl::StatusCode::kUnavailable) << refused;
  EXPECT_THAT(refused.reason, ::testing::AnyOf("NO_EPOCH", "STEP_LOST")) << refused;
  EXPECT_EQ(cluster->control().Health(""), "NOT_SERVING");
  ASSERT_TRUE(cluster->StartRank(1));
  ASSERT_TRUE(cluster->WaitForEpoch(2));
  const CallOutcome again = cluster->control().Forward(request);
  ASSERT_TRUE(again.ok()) << again;
  EXPECT_EQ(again.response.output().data(), first.response.output().data());
  ExpectNoMisuse(*cluster, 2);
}

// Both say what NCCL says of it, the one whose peer fails as well.
TEST(NcclWeatherTest, ARankWhoseNcclCannotStartIsNamed) {
  RankCluster::Options options = Group(2);
  options.rank_environment = {"NCCL_OVER_SOCKETS=init_fails"};
  const auto cluster = RankCluster::StartWithoutEpoch(options);
  ASSERT_NE(cluster, nullptr);
  constexpr char kWhy[] = "ncclCommInitRankConfig: unhandled system error: Bootstrap : no socket";
  EXPECT_TRUE(cluster->control()
                  .process()
                  .WaitForLine(absl::StrCat("an epoch did not come to stand .*", kWhy), kPlenty)
                  .ok());
  for (int32_t rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(cluster->rank(rank)
                    .WaitForLine(absl::StrCat("cannot form an epoch .*", kWhy), kPlenty)
                    .ok());
    ASSERT_TRUE(cluster->rank(rank).Terminate().ok());
    EXPECT_EQ(cluster->rank(rank).Wait(kPlenty).value_or(-1), 0);
  }
}

// Its sockets stand: NCCL notices nothing, and its kernels wait for ever.
TEST(NcclWeatherTest, AStoppedRankIsLostAndComesBack) {
  Oracle oracle(2, GpuInOneProcess(kRankCheckpoint));
  ASSERT_TRUE(oracle.ok());
  RankCluster::Options options = Group(2);
  options.control_args.push_back("--heartbeat_timeout=10s");
  const auto cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  RankLoad load(cluster.get(), &oracle, 7, {.num_callers = 4, .timeout = kPlenty});
  ASSERT_TRUE(load.WaitForAnswers(5));
  ASSERT_TRUE(cluster->rank(1).Signal(SIGSTOP).ok());
  EXPECT_TRUE(cluster->control().process().WaitForLine("a rank was lost ep_rank=1", kPlenty).ok());
  ASSERT_TRUE(cluster->rank(1).Signal(SIGCONT).ok());
  ASSERT_TRUE(cluster->WaitForEpoch(2));
  EXPECT_TRUE(load.WaitForAnswers(5));
  load.Stop();
  EXPECT_EQ(load.num_unavailable(), 0);
  ExpectNoMisuse(*cluster, 2);
}

TEST(NcclWeatherTest, ARankLeavesUnderLoad) {
  Oracle oracle(2, GpuInOneProcess(kRankCheckpoint));
  ASSERT_TRUE(oracle.ok());
  const auto cluster = RankCluster::Start(Group(2));
  ASSERT_NE(cluster, nullptr);
  RankLoad load(cluster.get(), &oracle, 8, {.num_callers = 4, .timeout = kPlenty});
  for (uint64_t epoch = 2; epoch <= 4; ++epoch) {
    const auto leaver = static_cast<int32_t>(epoch % 2);
    ASSERT_TRUE(load.WaitForAnswers(5));
    ASSERT_TRUE(cluster->rank(leaver).Terminate().ok());
    EXPECT_EQ(cluster->rank(leaver).Wait(kPlenty).value_or(-1), 0);
    EXPECT_THAT(cluster->rank(leaver).Stderr(), HasSubstr("left the group"));
    ASSERT_TRUE(cluster->StartRank(leaver));
    ASSERT_TRUE(cluster->WaitForEpoch(epoch));
  }
  EXPECT_TRUE(load.WaitForAnswers(5));
  load.Stop();
  EXPECT_EQ(load.num_unavailable(), 0);
  ExpectNoMisuse(*cluster, 2);
}

// Only another process may have the device's memory again.
TEST(NcclWeatherTest, ARankWhoseAbortHangsEndsAndIsReplaced) {
  Oracle oracle(2, GpuInOneProcess(kRankCheckpoint));
  ASSERT_TRUE(oracle.ok());
  RankCluster::Options options = Group(2);
  options.rank_environment = {"NCCL_OVER_SOCKETS=abort_hangs"};
  const auto cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  const v1::ForwardRequest request = RandomRequest(oracle.model, 3);
  const std::string answer = oracle.Answer(request);
  ASSERT_TRUE(cluster->rank(1).Kill().ok());
  const absl::StatusOr<int> exit_code = cluster->rank(0).Wait(kPlenty);
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 1);
  EXPECT_THAT(cluster->rank(0).Stderr(), HasSubstr("NCCL does not come back: this process ends"));
  EXPECT_THAT(cluster->rank(0).Stderr(), HasSubstr("did not return within 20s after"));
  for (int32_t rank = 0; rank < 2; ++rank) ASSERT_TRUE(cluster->StartRank(rank));
  ASSERT_TRUE(cluster->WaitForEpoch(2));
  const CallOutcome outcome = cluster->control().Forward(request);
  ASSERT_TRUE(outcome.ok()) << outcome;
  EXPECT_EQ(outcome.response.output().data(), answer);
}

}  // namespace
}  // namespace expertmesh
