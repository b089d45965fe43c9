// What operators see of ranks that are processes: /metrics and GetStatus against counted work, and
// the life of a rank from loading to lost.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/integration/process_usage.h"
#include "tests/integration/rank_books.h"
#include "tests/integration/rank_cluster.h"
#include "tests/integration/server_under_test.h"
#include "tests/integration/sparse_checkpoint.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

constexpr char kCheckpoint[] = "tests/golden/qwen3_moe_bfloat16";
constexpr absl::Duration kPlenty = absl::Seconds(60);

std::string PerRank(const std::string& what, int32_t rank) {
  return absl::StrCat("expertmesh_rank_", what, "{rank=\"", rank, "\"}");
}

std::string SentBytes(int32_t source, int32_t destination) {
  return absl::StrCat("expertmesh_rank_sent_bytes_total{source=\"", source, "\",destination=\"",
                      destination, "\"}");
}

std::string Wait(int32_t destination, int32_t source) {
  return absl::StrCat("expertmesh_rank_wait_seconds_total{destination=\"", destination,
                      "\",source=\"", source, "\"}");
}

// Of 12 experts each rank holds as many, so that owners are known without asking.
TEST(RankStatusTest, MetricsAreTheCountedWorkOfEveryRank) {
  constexpr uint64_t kSeed = 3;
  SCOPED_TRACE(absl::StrCat("seed ", kSeed));
  std::mt19937_64 random(kSeed);
  constexpr int32_t kNumRanks = 3;
  const auto cluster = RankCluster::Start(
      {.checkpoint = kCheckpoint,
       .ep_size = kNumRanks,
       .control_args = {"--allow_dispatch_option", "--allow_admin", "--metrics_top_experts=5"}});
  ASSERT_NE(cluster, nullptr);
  ServerUnderTest& control = cluster->control();
  EXPECT_EQ(control.Metric("expertmesh_epoch"), 1);
  const auto running = control.GetStatus();
  ASSERT_TRUE(running.ok());
  EXPECT_EQ(control.Metric(absl::StrCat("expertmesh_build_info{isa=\"",
                                        running->ranks(0).instruction_set(),
                                        "\",ranks=\"3\",version=\"", running->version(), "\"}")),
            1);
  EXPECT_EQ(control.Metric(SentBytes(0, 1)), 0);
  RankBooks books(kNumRanks);
  int num_steps = 0;
  constexpr v1::DispatchMode kModes[] = {v1::DISPATCH_MODE_ALL_TO_ALL,
                                         v1::DISPATCH_MODE_ALLGATHER_REDUCESCATTER,
                                         v1::DISPATCH_MODE_DIRECT};
  for (const v1::DispatchMode mode : kModes) {
    for (const v1::Combine combine : {v1::COMBINE_PER_OWNER, v1::COMBINE_PER_EXPERT}) {
      for (const int64_t num_tokens : {1, 2, 9, 40}) {
        v1::ForwardRequest request = RankBooks::RandomRequest(random, num_tokens, 4);
        request.mutable_options()->set_dispatch(mode);
        request.mutable_options()->set_combine(combine);
        const CallOutcome outcome = control.Forward(request);
        ASSERT_TRUE(outcome.ok()) << outcome;
        books.Add(request);
        ++num_steps;
        for (int32_t source = 0; source < kNumRanks; ++source) {
          for (int32_t destination = 0; destination < kNumRanks; ++destination) {
            if (source == destination) continue;
            ASSERT_EQ(control.Metric(SentBytes(source, destination)),
                      books.bytes[source][destination])
                << v1::DispatchMode_Name(mode) << ", " << v1::Combine_Name(combine) << ", "
                << num_tokens << " tokens, " << source << " to " << destination;
          }
        }
      }
    }
  }
  int64_t all_rows = 0;
  const auto status = control.GetStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  ASSERT_EQ(status->ranks_size(), kNumRanks);
  for (int32_t rank = 0; rank < kNumRanks; ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    all_rows += books.rows[rank];
    EXPECT_EQ(control.Metric(PerRank("expert_rows_total", rank)), books.rows[rank]);
    EXPECT_EQ(control.Metric(PerRank("steps_total", rank)), num_steps);
    EXPECT_GT(control.Metric(PerRank("compute_seconds_total", rank)), 0);
    EXPECT_EQ(control.Metric(PerRank("active", rank)), 1);
    for (int32_t peer = 0; peer < kNumRanks; ++peer) {
      if (peer == rank) continue;
      EXPECT_GT(control.Metric(Wait(rank, peer)), 0);
    }
    const v1::RankStatus& shown = status->ranks(rank);
    EXPECT_EQ(shown.state(), v1::RANK_STATE_ACTIVE);
    EXPECT_EQ(static_cast<int64_t>(shown.num_expert_rows()), books.rows[rank]);
    EXPECT_EQ(static_cast<int>(shown.num_steps()), num_steps);
    EXPECT_EQ(shown.num_experts(), 2 * RankBooks::kNumExperts / kNumRanks) << "two layers";
    EXPECT_GT(shown.memory_used_bytes(), shown.weight_bytes());
    EXPECT_GT(shown.memory_limit_bytes(), shown.memory_used_bytes());
    EXPECT_FALSE(shown.instruction_set().empty());
  }
  const int64_t most_rows = *std::max_element(books.rows.begin(), books.rows.end());
  const double imbalance =
      static_cast<double>(most_rows) * kNumRanks / static_cast<double>(all_rows);
  EXPECT_NEAR(control.Metric("expertmesh_load_imbalance"), imbalance, 1e-5);
  EXPECT_DOUBLE_EQ(status->load_imbalance(), imbalance);
  EXPECT_GT(status->epoch_age_micros(), 0);

  // The busiest five and the rest; equal ones by number.
  std::vector<std::pair<int64_t, int32_t>> experts;
  for (const auto& [id, tokens] : books.tokens) experts.push_back({-tokens, id});
  std::sort(experts.begin(), experts.end());
  int64_t rest = 0;
  for (size_t i = 0; i < experts.size(); ++i) {
    const std::string series =
        absl::StrCat("expertmesh_expert_tokens{model=\"qwen3_moe_bfloat16\",layer=\"",
                     RankBooks::kLayer, "\",expert=\"", experts[i].second, "\"}");
    if (i < 5) {
      EXPECT_EQ(control.Metric(series), -experts[i].first);
    } else {
      EXPECT_EQ(control.Metric(series), -1) << "no such series";
      rest -= experts[i].first;
    }
  }
  EXPECT_EQ(control.Metric("expertmesh_expert_tokens{model=\"qwen3_moe_bfloat16\",layer=\"rest\","
                           "expert=\"rest\"}"),
            rest);
}

// A step that hangs on a stopped rank, which is then killed, is run again by its successor.
TEST(RankStatusTest, AReplayedStepIsCountedOnceAndAgain) {
  std::mt19937_64 random(5);
  const auto cluster =
      RankCluster::Start({.checkpoint = kCheckpoint,
                          .ep_size = 2,
                          .control_args = {"--allow_admin", "--heartbeat_timeout=60s"}});
  ASSERT_NE(cluster, nullptr);
  ServerUnderTest& control = cluster->control();
  const v1::ForwardRequest request = RankBooks::RandomRequest(random, 20, 3);
  ASSERT_TRUE(control.Forward(request).ok());
  ASSERT_TRUE(cluster->rank(1).Signal(SIGSTOP).ok());
  ASSERT_TRUE(WaitUntilStopped(cluster->rank(1).pid()));
  PendingForward hanging = control.StartForward(request, kPlenty);
  const absl::Time deadline = absl::Now() + kPlenty;
  while (control.GetStatus()->queue().num_steps_in_flight() == 0 && absl::Now() < deadline) {
  }
  ASSERT_TRUE(cluster->rank(1).Kill().ok());
  ASSERT_TRUE(cluster->StartRank(1));
  ASSERT_TRUE(cluster->WaitForEpoch(2));
  const CallOutcome outcome = hanging.Wait();
  EXPECT_TRUE(outcome.ok()) << outcome;
  EXPECT_EQ(outcome.response.served_by().epoch(), 2u);
  EXPECT_EQ(control.Metric("expertmesh_epoch"), 2);
  EXPECT_EQ(control.Metric("expertmesh_steps_total"), 2);
  EXPECT_EQ(control.Metric("expertmesh_failed_steps_total"), 1);
  EXPECT_EQ(control.Metric("expertmesh_replayed_steps_total"), 1);
  const auto status = control.GetStatus();
  ASSERT_TRUE(status.ok());
  EXPECT_EQ(status->num_replays(), 1u);
  EXPECT_EQ(status->num_lanes(), 2);
  for (int32_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(control.Metric(PerRank("steps_total", rank)), 2) << "since the start";
    EXPECT_EQ(status->ranks(rank).num_steps(), 1u) << "of this epoch";
  }
}

// Waits until the rank is in `state`; its status, empty when it does not come.
v1::RankStatus WaitForState(ServerUnderTest& control, int32_t rank, v1::RankState state) {
  const absl::Time deadline = absl::Now() + kPlenty;
  while (absl::Now() < deadline) {
    const auto status = control.GetStatus();
    if (status.ok() && status->ranks(rank).state() == state) return status->ranks(rank);
  }
  ADD_FAILURE() << "rank " << rank << " never was " << v1::RankState_Name(state);
  return {};
}

TEST(RankStatusTest, StatusTellsTheLifeOfARank) {
  const SparseCheckpoint checkpoint({.num_experts = 16});
  const auto cluster =
      RankCluster::Start({.checkpoint = checkpoint.path(),
                          .ep_size = 2,
                          .control_args = {"--allow_admin", "--heartbeat_timeout=20s"}});
  ASSERT_NE(cluster, nullptr);
  ServerUnderTest& control = cluster->control();
  EXPECT_EQ(WaitForState(control, 1, v1::RANK_STATE_ACTIVE).load_progress(), 1);

  ASSERT_TRUE(cluster->rank(1).Kill().ok());
  const v1::RankStatus lost = WaitForState(control, 1, v1::RANK_STATE_LOST);
  EXPECT_THAT(lost.detail(), HasSubstr("stream"));
  const auto waiting = control.GetStatus();
  ASSERT_TRUE(waiting.ok());
  EXPECT_FALSE(waiting->ready());
  EXPECT_EQ(waiting->epoch(), 0u);
  EXPECT_EQ(control.Metric("expertmesh_epoch"), 0);
  EXPECT_EQ(control.Metric(PerRank("active", 1)), 0);

  // It is stopped as soon as it says that it loads; now and then it has loaded before that.
  bool was_seen = false;
  for (int attempt = 0; attempt < 20 && !was_seen; ++attempt) {
    if (attempt > 0) {
      ASSERT_TRUE(cluster->rank(1).Kill().ok());
      WaitForState(control, 1, v1::RANK_STATE_LOST);
    }
    ASSERT_TRUE(cluster->StartRank(1));
    v1::RankState state = v1::RANK_STATE_LOST;
    const absl::Time deadline = absl::Now() + kPlenty;
    while (state == v1::RANK_STATE_LOST && absl::Now() < deadline) {
      state = control.GetStatus()->ranks(1).state();
    }
    ASSERT_TRUE(cluster->rank(1).Signal(SIGSTOP).ok());
    ASSERT_TRUE(WaitUntilStopped(cluster->rank(1).pid()));
    const v1::RankStatus loading = control.GetStatus()->ranks(1);
    was_seen = loading.state() == v1::RANK_STATE_LOADING;
    if (was_seen) {
      EXPECT_LT(loading.load_progress(), 1);
      EXPECT_GT(loading.memory_used_bytes(), 0);
      EXPECT_EQ(loading.address(), "127.0.0.1");
      EXPECT_FALSE(loading.instruction_set().empty());
    }
    ASSERT_TRUE(cluster->rank(1).Signal(SIGCONT).ok());
  }
  EXPECT_TRUE(was_seen);
  const v1::RankStatus active = WaitForState(control, 1, v1::RANK_STATE_ACTIVE);
  EXPECT_EQ(active.load_progress(), 1);
  EXPECT_EQ(active.detail(), "");
}

// Rank 0 is there and tells the others an address where it does not listen.
TEST(RankStatusTest, WhyAllRanksFormNoEpochIsToldUntilOneStands) {
  const auto cluster = RankCluster::Start(
      {.checkpoint = kCheckpoint, .ep_size = 2, .control_args = {"--allow_admin"}});
  ASSERT_NE(cluster, nullptr);
  ServerUnderTest& control = cluster->control();
  ASSERT_TRUE(cluster->rank(0).Kill().ok());
  WaitForState(control, 0, v1::RANK_STATE_LOST);
  const auto misplaced =
      cluster->StartExpertServer({absl::StrCat("--checkpoint=", kCheckpoint), "--ep_rank=0",
                                  "--ep_size=2", "--threads=1", "--advertise_address=127.0.0.99"});
  ASSERT_NE(misplaced, nullptr);
  ASSERT_TRUE(
      control.process().WaitForLine("an epoch did not come to stand.*127.0.0.99", kPlenty).ok());
  const auto why = [&control] { return control.GetStatus()->detail(); };
  EXPECT_THAT(why(), testing::StartsWith("all ranks are there, but rank 1 could not form epoch "));
  EXPECT_THAT(why(), HasSubstr("127.0.0.99"));
  EXPECT_THAT(control.GetStatus()->ranks(1).detail(), HasSubstr("could not form epoch "));
  std::mt19937_64 random(1);
  const v1::ForwardRequest request = RankBooks::RandomRequest(random, 3, 2);
  CallOutcome refused;
  // On a busy machine the deadline itself comes before an answer just before it.
  for (absl::Duration timeout = absl::Seconds(1); timeout < kPlenty && refused.reason.empty();
       timeout *= 2) {
    refused = control.StartForward(request, timeout).Wait();
  }
  EXPECT_EQ(refused.reason, "NO_EPOCH");
  EXPECT_THAT(refused.message, HasSubstr("all ranks are there, but rank 1 could not form epoch "));

  ASSERT_TRUE(misplaced->Kill().ok());
  WaitForState(control, 0, v1::RANK_STATE_LOST);
  EXPECT_EQ(why(), "not all ranks are there");
  ASSERT_TRUE(cluster->StartRank(0));
  WaitForState(control, 1, v1::RANK_STATE_ACTIVE);
  const CallOutcome served = control.Forward(request);
  EXPECT_TRUE(served.ok()) << served;
  EXPECT_EQ(why(), "");
  EXPECT_EQ(control.GetStatus()->ranks(1).detail(), "");
}

TEST(RankStatusTest, OneInstructionSetPerGroup) {
  const auto cluster = RankCluster::Start({.checkpoint = kCheckpoint,
                                           .ep_size = 2,
                                           .control_args = {"--allow_admin"},
                                           .rank_args = {"--isa=portable"}});
  ASSERT_NE(cluster, nullptr);
  ServerUnderTest& control = cluster->control();
  std::mt19937_64 random(1);
  const v1::ForwardRequest request = RankBooks::RandomRequest(random, 3, 2);
  CallOutcome outcome = control.Forward(request);
  ASSERT_TRUE(outcome.ok()) << outcome;
  EXPECT_EQ(outcome.response.served_by().instruction_set(), "portable");
  EXPECT_EQ(control.GetModel("")->instruction_set(), "portable");
  EXPECT_EQ(control.GetStatus()->ranks(1).instruction_set(), "portable");

  ASSERT_TRUE(cluster->rank(1).Kill().ok());
  WaitForState(control, 1, v1::RANK_STATE_LOST);
  v1::ExplainRequest explain;
  *explain.mutable_request() = request;
  const auto explained = control.Explain(explain);
  ASSERT_TRUE(explained.ok()) << explained.status();
  EXPECT_EQ(explained->epoch(), 0u);
  EXPECT_THAT(explained->warnings(), testing::Contains(HasSubstr("no epoch stands")));

  const auto other = cluster->StartExpertServer(
      {absl::StrCat("--checkpoint=", kCheckpoint), "--ep_rank=1", "--ep_size=2", "--threads=1"});
  ASSERT_NE(other, nullptr);
  const auto loaded = other->WaitForLine("loaded ep_rank=1.*isa=([a-z0-9_]+)", kPlenty);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  if ((*loaded)[1] == "portable") GTEST_SKIP() << "this machine has no other instruction set";
  const auto exit_code = other->Wait(kPlenty);
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 1);
  EXPECT_THAT(other->Stderr(), HasSubstr(absl::StrCat("rank 1 computes with ", (*loaded)[1],
                                                      ", rank 0 with portable")));
  EXPECT_THAT(other->Stderr(), HasSubstr("--isa"));
  const v1::RankStatus refused = WaitForState(control, 1, v1::RANK_STATE_REFUSED);
  EXPECT_THAT(refused.detail(), HasSubstr(absl::StrCat("rank 1 computes with ", (*loaded)[1])));
  ASSERT_TRUE(cluster->StartRank(1));
  ASSERT_TRUE(cluster->WaitForEpoch(2));
  EXPECT_TRUE(control.Forward(request).ok());
}

}  // namespace
}  // namespace expertmesh
