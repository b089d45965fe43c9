// The rank link's own behaviour, both ends of it in this process.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/base/steady_now.h"
#include "server/ops/call_error.h"
#include "tests/server/cluster/random_moe.h"
#include "tests/server/ops/no_more_threads.h"
#include "tests/server/rpc/linked_ranks.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

constexpr DispatchMode kModes[] = {DispatchMode::kAllToAll, DispatchMode::kAllGatherReduceScatter,
                                   DispatchMode::kDirect};

class RankLinkTest : public testing::Test {
 protected:
  absl::StatusOr<std::vector<std::vector<std::byte>>> Run(DispatchMode mode) {
    choices_.strategy = mode;
    return RunTokens(ranks_.group(), moe_, tokens_, choices_);
  }
  // In the same epoch, with the right answer.
  void ExpectWorks(DispatchMode mode, uint64_t epoch) {
    const auto outputs = Run(mode);
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    ExpectNearReference(moe_, tokens_, choices_, *outputs);
    EXPECT_EQ(ranks_.group().epoch(), epoch);
  }

  const RandomMoe moe_{RandomMoeShape{20, 12, 9, 4}, 1};
  const RandomTokens tokens_{moe_, 30, DType::kFloat32, 2};
  StepChoices choices_;
  LinkedRanks ranks_{*moe_.source, {.ep_size = 3}};
};

void ExpectReason(const absl::Status& status, ErrorReason reason) {
  const std::optional<CallErrorDetails> details = GetCallErrorDetails(status);
  ASSERT_TRUE(details.has_value()) << status;
  EXPECT_EQ(details->reason, reason) << status;
}

TEST_F(RankLinkTest, ARankWithoutMemoryForItsTokensFailsTheStepAlone) {
  const uint64_t epoch = ranks_.group().epoch();
  for (const DispatchMode mode : kModes) {
    SCOPED_TRACE(static_cast<int>(mode));
    ExpectWorks(mode, epoch);
    ranks_.rank_memory(1).FailNext(1);
    const auto outputs = Run(mode);
    ASSERT_FALSE(outputs.ok());
    ExpectReason(outputs.status(), ErrorReason::kBuffersExhausted);
    EXPECT_THAT(std::string(outputs.status().message()), HasSubstr("rank 1"));
    ExpectWorks(mode, epoch);
  }
}

TEST_F(RankLinkTest, AControlPlaneWithoutMemoryForAnOutputFailsTheStepAlone) {
  const uint64_t epoch = ranks_.group().epoch();
  for (const DispatchMode mode : kModes) {
    SCOPED_TRACE(static_cast<int>(mode));
    ranks_.control_memory().FailNext(1);
    const auto outputs = Run(mode);
    ASSERT_FALSE(outputs.ok());
    ExpectReason(outputs.status(), ErrorReason::kBuffersExhausted);
    ExpectWorks(mode, epoch);
  }
}

TEST_F(RankLinkTest, AStepThatDoesNotFitTheWireIsSentToNobody) {
  const uint64_t epoch = ranks_.group().epoch();
  std::vector<std::vector<std::byte>> memory;
  choices_.strategy = DispatchMode::kAllToAll;
  absl::StatusOr<GroupStep> step = MakeStep(ranks_.group(), moe_, tokens_, choices_, &memory);
  ASSERT_TRUE(step.ok()) << step.status();
  step->plan.slices[2].sum_rows[0] = int64_t{1} << 40;
  const absl::StatusOr<GroupStepResult> result =
      ranks_.group().RunStep(*std::move(step), false, absl::Now() + absl::Seconds(100));
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << result.status();
  ExpectWorks(DispatchMode::kAllToAll, epoch);
}

TEST_F(RankLinkTest, ARankThatIsToldToStopHasLeft) {
  EXPECT_TRUE(ranks_.StopRank(1).ok());
  const absl::Time deadline = SteadyNow() + absl::Minutes(1);
  while (ranks_.group().epoch() != 0) {
    ASSERT_LT(SteadyNow(), deadline);
    std::this_thread::yield();
  }
  const std::vector<MemberView> members = ranks_.group().Members();
  EXPECT_EQ(members[1].state, MemberState::kLeft);
  EXPECT_EQ(members[1].why, "it left");
  EXPECT_NE(members[0].member_id, 0u);
}

// An epoch's end may come while its beginning is being obeyed, at any moment of it.
TEST(RankLinkFormingTest, AnEpochThatEndsWhileItFormsIsLeftAtOnce) {
  const RandomMoe moe{RandomMoeShape{20, 12, 9, 4}, 1};
  const RandomTokens tokens{moe, 30, DType::kFloat32, 2};
  LinkedRanks::Options options;
  // What would have to pass otherwise.
  options.group.form_timeout = absl::Minutes(5);
  options.group.teardown_timeout = absl::Minutes(5);
  LinkedRanks ranks(*moe.source, options);
  RemoteExpertGroup& group = ranks.group();
  StepChoices choices;
  choices.strategy = DispatchMode::kAllToAll;
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(round);
    const uint64_t epoch = group.epoch();
    std::vector<std::vector<std::byte>> memory;
    absl::StatusOr<GroupStep> step = MakeStep(group, moe, tokens, choices, &memory);
    ASSERT_TRUE(step.ok()) << step.status();
    step->plan.slices[1].pair_local_expert[0] = 99;  // ends the epoch
    EXPECT_FALSE(group.RunStep(*std::move(step), false, SteadyNow() + absl::Minutes(1)).ok());
    // Seen too late, some of them stand.
    const absl::Time deadline = SteadyNow() + absl::Minutes(1);
    while (group.epoch() <= epoch && !group.CheckForming(group.incarnation(), epoch + 1).ok()) {
      ASSERT_LT(SteadyNow(), deadline);
      std::this_thread::yield();
    }
    // More or less of the forming has been done by then.
    for (int i = 0; i < round; ++i) std::this_thread::yield();
    group.OnEpochReady(group.Members()[0].member_id, epoch + 1,
                       absl::UnknownError("says the test"));
    ASSERT_TRUE(ranks.AwaitEpochAfter(epoch));
  }
  const auto outputs = RunTokens(group, moe, tokens, choices);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
}

TEST_F(RankLinkTest, ARankThatGetsNoThreadsJoinsAgainUntilItDoes) {
  const uint64_t epoch = ranks_.group().epoch();
  {
    const NoMoreThreads none;
    ranks_.group().OnStreamEnded(ranks_.group().Members()[1].member_id,
                                 absl::UnavailableError("the test cut it"));
    // It comes and goes.
    const uint64_t first = ranks_.AwaitMember(1, 0);
    ASSERT_NE(first, 0u);
    ASSERT_NE(ranks_.AwaitMember(1, first), 0u);
    EXPECT_EQ(ranks_.group().epoch(), 0u);
  }
  ASSERT_TRUE(ranks_.AwaitEpochAfter(epoch));
  ExpectWorks(DispatchMode::kAllToAll, ranks_.group().epoch());
}

}  // namespace
}  // namespace expertmesh
