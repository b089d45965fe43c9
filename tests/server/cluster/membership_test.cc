#include "server/cluster/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/server/cluster/membership_group.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kIncarnation = MembershipGroup::kIncarnation;
constexpr absl::Duration kHeartbeatTimeout = MembershipGroup::kHeartbeatTimeout;

TEST(MembershipTest, AnEpochStandsWhenAllHaveComeAndAreReady) {
  MembershipGroup group(3, 8);
  Membership& membership = group.membership();
  const uint64_t a = group.JoinAndAttach(0, 1);
  const uint64_t b = group.JoinAndAttach(2, 2);
  EXPECT_TRUE(membership.TakeActions().empty());
  const absl::StatusOr<uint64_t> c = membership.Join(group.Offer(1, 3));
  ASSERT_TRUE(c.ok());
  EXPECT_TRUE(membership.TakeActions().empty()) << "rank 1 has no stream yet";
  ASSERT_TRUE(membership.Attach(kIncarnation, *c).ok());
  const std::vector<MembershipAction> actions = membership.TakeActions();
  ASSERT_EQ(actions.size(), 3u);
  for (int32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(actions[rank].kind, MembershipAction::Kind::kEnterEpoch);
    EXPECT_EQ(actions[rank].ep_rank, rank);
    EXPECT_EQ(actions[rank].epoch, 1u);
  }
  EXPECT_EQ(membership.forming_epoch(), 1u);
  membership.EpochReady(a, 1, absl::OkStatus());
  membership.EpochReady(b, 1, absl::OkStatus());
  EXPECT_EQ(membership.epoch(), 0u);
  membership.EpochReady(*c, 1, absl::OkStatus());
  EXPECT_EQ(membership.epoch(), 1u);
  EXPECT_EQ(membership.View()[2].state, MemberState::kActive);
  EXPECT_EQ(membership.View()[2].num_experts, 2);
}

TEST(MembershipTest, AnEpochsEndTellsALeaveAndAStopFromALoss) {
  for (const EpochEndKind kind :
       {EpochEndKind::kLoss, EpochEndKind::kRankLeft, EpochEndKind::kControlPlaneStops}) {
    MembershipGroup group(2, 6);
    Membership& membership = group.membership();
    const std::vector<uint64_t> ids = group.Stand();
    std::string why;
    switch (kind) {
      case EpochEndKind::kLoss:
        membership.Lose(ids[0], absl::UnavailableError("rank 0 left"));
        why = "rank 0 was lost: it left";
        break;
      case EpochEndKind::kRankLeft:
        membership.Leave(ids[0]);
        why = "rank 0 left";
        break;
      case EpochEndKind::kControlPlaneStops:
        membership.Close(absl::UnavailableError("enough"));
        why = "enough";
        break;
    }
    int num_ends = 0;
    for (const MembershipAction& action : membership.TakeActions()) {
      EXPECT_EQ(action.end.kind, kind);
      if (action.kind != MembershipAction::Kind::kEndEpoch) continue;
      ++num_ends;
      EXPECT_EQ(action.member_id, ids[1]);
      EXPECT_EQ(action.end.reason.message(), why);
    }
    EXPECT_EQ(num_ends, 1);
    EXPECT_EQ(membership.last_end().kind, kind);
    EXPECT_EQ(membership.last_end().reason.message(), why);
  }
}

TEST(MembershipTest, TheNextEpochWaitsForEverySurvivorsTeardown) {
  MembershipGroup group(3, 6);
  Membership& membership = group.membership();
  const std::vector<uint64_t> ids = group.Stand();
  membership.Lose(ids[1], absl::UnavailableError("its stream broke"));
  EXPECT_EQ(membership.epoch(), 0u);
  const std::vector<MembershipAction> actions = membership.TakeActions();
  ASSERT_EQ(actions.size(), 3u);
  EXPECT_EQ(actions[0].kind, MembershipAction::Kind::kDrop);
  EXPECT_EQ(actions[0].member_id, ids[1]);
  EXPECT_EQ(actions[1].kind, MembershipAction::Kind::kEndEpoch);
  EXPECT_EQ(actions[1].member_id, ids[0]);
  EXPECT_EQ(actions[2].member_id, ids[2]);
  EXPECT_THAT(std::string(actions[2].end.reason.message()), HasSubstr("rank 1 was lost"));

  // It is back before the others have dropped the epoch.
  group.JoinAndAttach(1, 555);
  EXPECT_TRUE(membership.TakeActions().empty());
  membership.EpochDown(ids[0], 1);
  membership.EpochDown(ids[0], 1);
  EXPECT_TRUE(membership.TakeActions().empty());
  membership.EpochDown(ids[2], 1);
  EXPECT_EQ(membership.TakeActions().size(), 3u);
  EXPECT_EQ(membership.forming_epoch(), 2u);
}

TEST(MembershipTest, ALateHeartbeatLosesTheMember) {
  MembershipGroup group(2, 4);
  Membership& membership = group.membership();
  const std::vector<uint64_t> ids = group.Stand();
  group.clock.Advance(kHeartbeatTimeout - absl::Milliseconds(1));
  membership.Tick();
  EXPECT_EQ(membership.epoch(), 1u);
  ASSERT_TRUE(membership.Heartbeat(kIncarnation, ids[0]).ok());
  EXPECT_EQ(membership.next_deadline(), group.clock.Now() + absl::Milliseconds(1));
  group.clock.Advance(absl::Milliseconds(1));
  membership.Tick();
  EXPECT_EQ(membership.epoch(), 0u);
  EXPECT_EQ(membership.View()[1].state, MemberState::kLost);
  EXPECT_EQ(membership.View()[0].state, MemberState::kTearingDown);
  const absl::Status late = membership.Heartbeat(kIncarnation, ids[1]);
  EXPECT_EQ(ReasonOf(late), ErrorReason::kStaleEpoch);
  EXPECT_EQ(late.message(), "no heartbeat for 2s");
}

TEST(MembershipTest, TheSameProcessMayJoinAgainAtOnce) {
  MembershipGroup group(2, 4);
  Membership& membership = group.membership();
  const std::vector<uint64_t> ids = group.Stand();
  const uint64_t again = group.JoinAndAttach(1, 101);
  EXPECT_NE(again, ids[1]);
  group.AnswerAll();
  EXPECT_EQ(membership.epoch(), 2u);
}

TEST(MembershipTest, AnEpochThatCannotBeFormedIsTriedAgainLaterAndLater) {
  MembershipGroup group(2, 4);
  Membership& membership = group.membership();
  const std::vector<uint64_t> ids = {group.JoinAndAttach(0, 1), group.JoinAndAttach(1, 2)};
  absl::Duration last_delay;
  for (uint64_t epoch = 1; epoch <= 8; ++epoch) {
    ASSERT_EQ(membership.forming_epoch(), epoch);
    membership.EpochReady(ids[0], epoch, absl::OkStatus());
    membership.EpochReady(ids[1], epoch, absl::UnavailableError("no such address"));
    const std::string why =
        absl::StrCat("rank 1 could not form epoch ", epoch, ": no such address");
    EXPECT_EQ(membership.WhyNoEpoch(), "all ranks are there, but " + why);
    group.AnswerAll();
    EXPECT_EQ(membership.forming_epoch(), 0u);
    EXPECT_EQ(membership.View()[0].why, "");
    EXPECT_EQ(membership.View()[1].why, why);
    EXPECT_EQ(membership.WhyNoEpoch(), "all ranks are there, but " + why);
    const absl::Duration delay = membership.next_deadline() - group.clock.Now();
    EXPECT_GE(delay, last_delay);
    EXPECT_LE(delay, absl::Seconds(2));
    last_delay = delay;
    group.clock.Advance(delay);
    for (const uint64_t id : ids) ASSERT_TRUE(membership.Heartbeat(kIncarnation, id).ok());
    membership.Tick();
  }
  EXPECT_THAT(membership.WhyNoEpoch(), HasSubstr("rank 1 could not form epoch 8"));
  group.AnswerAll();
  EXPECT_EQ(membership.epoch(), 9u);
  EXPECT_EQ(membership.View()[1].why, "");
}

TEST(MembershipTest, WhoDoesNotFormOrDropAnEpochInTimeDoesNotHoldUpTheOthers) {
  MembershipGroup group(2, 4);
  Membership& membership = group.membership();
  const std::vector<uint64_t> ids = {group.JoinAndAttach(0, 1), group.JoinAndAttach(1, 2)};
  const auto live = [&](absl::Duration duration) {
    for (; duration > absl::ZeroDuration(); duration -= absl::Seconds(1)) {
      group.clock.Advance(absl::Seconds(1));
      for (const uint64_t id : ids) membership.Heartbeat(kIncarnation, id).IgnoreError();
      membership.Tick();
    }
  };
  membership.EpochReady(ids[0], 1, absl::OkStatus());
  live(absl::Seconds(3));
  EXPECT_EQ(membership.View()[0].state, MemberState::kTearingDown);
  membership.EpochDown(ids[0], 1);
  EXPECT_EQ(membership.View()[1].state, MemberState::kTearingDown);
  live(absl::Seconds(3));
  EXPECT_EQ(membership.View()[1].state, MemberState::kLost);
  EXPECT_EQ(membership.View()[0].state, MemberState::kStandingBy);
}

}  // namespace
}  // namespace expertmesh
