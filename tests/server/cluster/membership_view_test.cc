// What operators are told of ranks: who is there, who is not and why, and why no epoch stands.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/cluster/membership.h"
#include "tests/server/cluster/membership_group.h"

namespace expertmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr uint64_t kIncarnation = MembershipGroup::kIncarnation;
constexpr absl::Duration kHeartbeatTimeout = MembershipGroup::kHeartbeatTimeout;

TEST(MembershipViewTest, ViewTellsWhoIsLoadingAndWhyOthersWereLost) {
  MembershipGroup group(2, 6);
  Membership& membership = group.membership();
  EXPECT_EQ(membership.View()[0].state, MemberState::kMissing);
  RankAnnouncement coming{.ep_rank = 1, .ep_size = 2, .address = "here", .instruction_set = "avx2"};
  coming.load_progress = 0.37;
  coming.memory_used_bytes = 1234;
  EXPECT_TRUE(membership.Announce(coming).value());
  EXPECT_FALSE(membership.Announce(coming).value()) << "not the first one";
  MemberView view = membership.View()[1];
  EXPECT_EQ(view.state, MemberState::kLoading);
  EXPECT_EQ(view.load_progress, 0.37);
  EXPECT_EQ(view.memory_used_bytes, 1234);
  EXPECT_EQ(view.address, "here");
  EXPECT_EQ(view.instruction_set, "avx2");
  EXPECT_TRUE(membership.TakeActions().empty());
  EXPECT_EQ(membership.next_deadline(), absl::InfiniteFuture());
  group.clock.Advance(kHeartbeatTimeout);
  EXPECT_EQ(membership.View()[1].state, MemberState::kMissing);
  EXPECT_TRUE(membership.Announce(coming).value());

  const std::vector<uint64_t> ids = group.Stand();
  EXPECT_TRUE(membership.Heartbeat(kIncarnation, ids[1], 5678).ok());
  view = membership.View()[1];
  EXPECT_EQ(view.state, MemberState::kActive);
  EXPECT_EQ(view.memory_used_bytes, 5678);
  EXPECT_EQ(view.load_progress, 1);
  // An announcement of another process changes nothing for a member.
  EXPECT_TRUE(membership.Announce(coming).ok());
  EXPECT_EQ(membership.View()[1].state, MemberState::kActive);
  EXPECT_EQ(membership.epoch(), 1u);

  group.clock.Advance(kHeartbeatTimeout);
  EXPECT_TRUE(membership.Heartbeat(kIncarnation, ids[0]).ok());
  membership.Lose(ids[1], absl::UnavailableError("its stream ended"));
  group.clock.Advance(absl::Seconds(1));
  view = membership.View()[1];
  EXPECT_EQ(view.state, MemberState::kLost);
  EXPECT_EQ(view.why, "its stream ended");
  EXPECT_EQ(view.why_age, absl::Seconds(1));
  EXPECT_TRUE(membership.Announce(coming).ok());
  EXPECT_EQ(membership.View()[1].state, MemberState::kLoading);
  membership.Leave(ids[0]);
  EXPECT_EQ(membership.View()[0].state, MemberState::kLeft);
  membership.Leave(ids[0]);

  coming.ep_size = 3;
  EXPECT_EQ(ReasonOf(membership.Announce(coming).status()), ErrorReason::kWrongEpSize);
  coming.ep_size = 2;
  for (const int32_t rank : {-1, 2}) {
    coming.ep_rank = rank;
    EXPECT_EQ(ReasonOf(membership.Announce(coming).status()), ErrorReason::kInvalidField);
  }
}

TEST(MembershipViewTest, ARefusedRankIsShownUntilItsPlaceIsTakenOrForAWhile) {
  MembershipGroup group(2, 5);
  Membership& membership = group.membership();
  RankOffer wrong = group.Offer(1, 7);
  wrong.models[0].fingerprint = "beef";
  RankAnnouncement coming{.ep_rank = 1, .ep_size = 2, .address = "here"};
  ASSERT_TRUE(membership.Announce(coming).ok());
  ASSERT_FALSE(membership.Join(wrong).ok());
  group.clock.Advance(absl::Seconds(1));
  MemberView view = membership.View()[1];
  EXPECT_EQ(view.state, MemberState::kRefused) << "its last announcement was before that";
  EXPECT_THAT(view.why, HasSubstr("fingerprint beef"));
  EXPECT_EQ(view.why_age, absl::Seconds(1));
  EXPECT_EQ(membership.View()[0].state, MemberState::kMissing);
  // Another try is loading.
  ASSERT_TRUE(membership.Announce(coming).ok());
  EXPECT_EQ(membership.View()[1].state, MemberState::kLoading);
  group.clock.Advance(kHeartbeatTimeout);
  EXPECT_EQ(membership.View()[1].state, MemberState::kRefused);

  const std::vector<uint64_t> ids = group.Stand();
  EXPECT_EQ(membership.View()[1].state, MemberState::kActive);
  EXPECT_EQ(membership.View()[1].why, "");
  ASSERT_FALSE(membership.Join(wrong).ok());
  EXPECT_EQ(membership.View()[1].state, MemberState::kActive) << "a stranger changes nothing";
  membership.Lose(ids[1], absl::UnavailableError("its stream ended"));
  EXPECT_EQ(membership.View()[1].state, MemberState::kLost) << "what came before is past";
  group.clock.Advance(absl::Seconds(1));
  ASSERT_FALSE(membership.Join(wrong).ok());
  EXPECT_EQ(membership.View()[1].state, MemberState::kRefused);
  EXPECT_THAT(membership.View()[1].why,
              AllOf(HasSubstr("fingerprint beef"),
                    HasSubstr("; before that it was lost: its stream ended")));
  group.clock.Advance(absl::Minutes(10));
  EXPECT_EQ(membership.View()[1].state, MemberState::kLost);

  // Refused before it has loaded anything, or by whoever looks at certificates.
  coming.ep_size = 3;
  ASSERT_FALSE(membership.Announce(coming).ok());
  view = membership.View()[1];
  EXPECT_EQ(view.state, MemberState::kRefused);
  EXPECT_THAT(view.why, HasSubstr("3 ranks"));
  for (const int32_t rank : {-1, 1, 2}) {
    membership.NoteRefusal(rank,
                           absl::PermissionDeniedError("\x1b[2J" + std::string(1 << 20, 'x')));
  }
  view = membership.View()[1];
  EXPECT_THAT(view.why, StartsWith("?[2Jxxx"));
  EXPECT_LE(view.why.size(), 1024u);
}

TEST(MembershipViewTest, ARivalIsShownBesideTheMemberThatHasThePlace) {
  MembershipGroup group(2, 6);
  Membership& membership = group.membership();
  const std::vector<uint64_t> ids = group.Stand();
  for (int attempt = 0; attempt < 3; ++attempt) {
    EXPECT_EQ(ReasonOf(membership.Join(group.Offer(1, 999)).status()), ErrorReason::kRankTaken);
    group.clock.Advance(absl::Milliseconds(500));
    const std::vector<MemberView> views = membership.View();
    EXPECT_EQ(views[1].state, MemberState::kActive);
    EXPECT_EQ(views[1].why, "");
    EXPECT_THAT(views[1].rival_why, HasSubstr("rank 1 is taken by"));
    EXPECT_EQ(views[1].rival_age, absl::Milliseconds(500));
    EXPECT_EQ(views[0].rival_why, "");
  }
  group.clock.Advance(absl::Minutes(1));
  EXPECT_EQ(membership.View()[1].rival_why, "");

  // Once the place is free it was lost, not refused; and who takes it has no rival.
  EXPECT_FALSE(membership.Join(group.Offer(1, 999)).ok());
  membership.Lose(ids[1], absl::UnavailableError("its stream ended"));
  EXPECT_EQ(membership.View()[1].state, MemberState::kLost);
  EXPECT_EQ(membership.View()[1].rival_why, "");
  EXPECT_TRUE(membership.Join(group.Offer(1, 999)).ok());
  EXPECT_EQ(membership.View()[1].rival_why, "");
}

TEST(MembershipViewTest, WhyThereIsNoEpochIsTheLastFailureWhereAllAreThere) {
  MembershipGroup group(3, 6);
  Membership& membership = group.membership();
  EXPECT_EQ(membership.WhyNoEpoch(), "not all ranks are there");
  const std::vector<uint64_t> ids = {group.JoinAndAttach(0, 1), group.JoinAndAttach(1, 2),
                                     group.JoinAndAttach(2, 3)};
  EXPECT_EQ(membership.WhyNoEpoch(), "all ranks are there, an epoch forms");
  // What a rank says is shown to people, and has its limits.
  membership.EpochReady(ids[2], 1, absl::UnknownError("\n" + std::string(5000, 'x')));
  EXPECT_EQ(membership.WhyNoEpoch().find('\n'), std::string::npos);
  EXPECT_LE(membership.WhyNoEpoch().size(), 1024u);
  group.AnswerAll();
  const auto try_again = [&group, &membership] {
    group.clock.Advance(absl::Milliseconds(200));
    membership.Tick();
  };
  try_again();
  ASSERT_EQ(membership.forming_epoch(), 2u);
  membership.EpochReady(ids[1], 2, absl::OkStatus());
  for (int i = 0; i < 3; ++i) {
    group.clock.Advance(absl::Seconds(1));
    for (const uint64_t id : ids) ASSERT_TRUE(membership.Heartbeat(kIncarnation, id).ok());
  }
  membership.Tick();
  const std::string late = "epoch 2 was not formed in 3s by ranks 0, 2";
  EXPECT_EQ(membership.WhyNoEpoch(), "all ranks are there, but " + late);
  EXPECT_EQ(membership.View()[0].why, late);
  EXPECT_EQ(membership.View()[1].why, "");
  EXPECT_EQ(membership.View()[2].why, late);

  group.AnswerAll();
  membership.Leave(ids[2]);
  EXPECT_EQ(membership.WhyNoEpoch(), "not all ranks are there");
  group.JoinAndAttach(2, 4);
  try_again();
  group.AnswerAll();
  ASSERT_EQ(membership.epoch(), 3u);
  membership.EndEpoch(3, absl::UnavailableError("a step took too long"));
  membership.EpochDown(ids[0], 3);
  EXPECT_THAT(membership.WhyNoEpoch(), HasSubstr("the last epoch is being left by ranks 1, 2"));
}

}  // namespace
}  // namespace expertmesh
