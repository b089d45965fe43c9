#include "server/cluster/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <utility>

#include "server/ops/call_error.h"
#include "tests/server/control/fake_clock.h"

namespace expertmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr uint64_t kIncarnation = 0xfeed;
constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2);

// A membership of a model "m" with one layer (index 3), and what its ranks offer.
class Group {
 public:
  Group(int32_t ep_size, int32_t num_experts)
      : placement_(Placement::Contiguous(num_experts, ep_size).value()) {
    MembershipOptions options;
    options.incarnation = kIncarnation;
    options.ep_size = ep_size;
    options.heartbeat_timeout = kHeartbeatTimeout;
    options.form_timeout = absl::Seconds(3);
    options.teardown_timeout = absl::Seconds(3);
    options.models.push_back({"m", "f00d", {{3, &placement_}}});
    membership_ = std::make_unique<Membership>(options, &clock);
  }

  RankOffer Offer(int32_t rank, uint64_t instance) const {
    RankOffer offer;
    offer.protocol_version = kRankProtocolVersion;
    offer.ep_rank = rank;
    offer.ep_size = placement_.ep_size();
    offer.instance = instance;
    offer.address = absl::StrCat("host-", rank);
    const absl::Span<const int32_t> held = placement_.local_experts(rank);
    offer.models.push_back(
        {"m", "f00d", {{3, placement_.num_experts(), {held.begin(), held.end()}}}});
    return offer;
  }

  uint64_t JoinAndAttach(int32_t rank, uint64_t instance) {
    const absl::StatusOr<uint64_t> id = membership_->Join(Offer(rank, instance));
    EXPECT_TRUE(id.ok()) << id.status();
    EXPECT_TRUE(membership_->Attach(kIncarnation, *id).ok());
    return *id;
  }

  // All ranks join, form an epoch and stand in it; gives their ids.
  std::vector<uint64_t> Stand() {
    std::vector<uint64_t> ids;
    for (int32_t rank = 0; rank < placement_.ep_size(); ++rank) {
      ids.push_back(JoinAndAttach(rank, 100 + rank));
    }
    AnswerAll();
    EXPECT_NE(membership_->epoch(), 0u);
    return ids;
  }

  // Every rank does at once what it is told, until nothing is asked any more.
  std::vector<MembershipAction> AnswerAll() {
    std::vector<MembershipAction> all;
    while (true) {
      const std::vector<MembershipAction> actions = membership_->TakeActions();
      if (actions.empty()) return all;
      for (const MembershipAction& action : actions) {
        if (action.kind == MembershipAction::Kind::kEnterEpoch) {
          membership_->EpochReady(action.member_id, action.epoch, absl::OkStatus());
        } else if (action.kind == MembershipAction::Kind::kEndEpoch) {
          membership_->EpochDown(action.member_id, action.epoch);
        }
        all.push_back(action);
      }
    }
  }

  Membership& membership() { return *membership_; }
  FakeClock clock;

 private:
  const Placement placement_;
  std::unique_ptr<Membership> membership_;
};

ErrorReason ReasonOf(const absl::Status& status) {
  const std::optional<CallErrorDetails> details = GetCallErrorDetails(status);
  return details.has_value() ? details->reason : ErrorReason::kInternalError;
}

TEST(MembershipTest, AnEpochStandsWhenAllHaveComeAndAreReady) {
  Group group(3, 8);
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

TEST(MembershipTest, RefusalsNameTheirReasonAndHarmNothing) {
  Group group(2, 5);
  Membership& membership = group.membership();
  group.Stand();
  struct Case {
    ErrorReason reason;
    std::function<void(RankOffer&)> spoil;
    const char* text;
  };
  const std::vector<Case> cases = {
      {ErrorReason::kRankTaken, [](RankOffer&) {}, "host-1"},
      {ErrorReason::kProtocolMismatch, [](RankOffer& o) { o.protocol_version = 7; }, "7"},
      {ErrorReason::kWrongEpSize, [](RankOffer& o) { o.ep_size = 3; },
       "started for 3 ranks, this group has 2"},
      {ErrorReason::kWrongEpSize, [](RankOffer& o) { o.ep_size = 1; },
       "started for 1 rank, this group has 2"},
      {ErrorReason::kInvalidField, [](RankOffer& o) { o.ep_rank = 2; }, "ep_rank"},
      {ErrorReason::kInvalidField, [](RankOffer& o) { o.ep_rank = -1; }, "ep_rank"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].model = "x"; },
       "does not hold model m; it holds x, this group serves m (a model has its folder's name"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models.clear(); },
       "0 models instead of 1; it holds none, this group serves m"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].fingerprint = "beef"; },
       "model m has fingerprint beef, this group serves "},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].fingerprint = "beef"; },
       ": another checkpoint, or another version of it; start the rank with the group's"},
      {ErrorReason::kWrongModel,
       [](RankOffer& o) {
         o.models[0].fingerprint = "beef";
         o.models[0].layers[0].num_experts = 6;
       },
       "model m has 6 experts in layer "},
      {ErrorReason::kWrongModel,
       [](RankOffer& o) {
         o.models[0].fingerprint = "beef";
         o.models[0].layers.clear();
       },
       "model m has 0 MoE layers instead of 1, fingerprint beef"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].layers[0].layer = 4; }, "layer 4"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].layers.clear(); }, "0 MoE"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].layers[0].num_experts = 6; },
       "of 6 experts"},
      {ErrorReason::kWrongModel,
       [](RankOffer& o) {
         o.models[0].layers[0].expert_ids = {0, 1};
       },
       "placement"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].layers[0].expert_ids = {3}; },
       "placement"},
  };
  for (const Case& c : cases) {
    RankOffer offer = group.Offer(1, 777);
    c.spoil(offer);
    const absl::Status status = membership.Join(offer).status();
    EXPECT_EQ(ReasonOf(status), c.reason) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text));
  }
  EXPECT_EQ(ReasonOf(membership.Heartbeat(kIncarnation + 1, 1)), ErrorReason::kStaleIncarnation);
  EXPECT_EQ(ReasonOf(membership.Heartbeat(kIncarnation, 99)), ErrorReason::kStaleEpoch);
  EXPECT_EQ(ReasonOf(membership.Attach(kIncarnation + 1, 1)), ErrorReason::kStaleIncarnation);
  EXPECT_EQ(ReasonOf(membership.Attach(kIncarnation, 1)), ErrorReason::kStaleEpoch);
  EXPECT_EQ(membership.epoch(), 1u);
  EXPECT_TRUE(membership.TakeActions().empty());
}

TEST(MembershipTest, ARankOfAnotherInstructionSetIsRefused) {
  Group group(3, 6);
  Membership& membership = group.membership();
  RankOffer offer = group.Offer(2, 1);
  offer.instruction_set = "avx2";
  ASSERT_TRUE(membership.Join(offer).ok());
  offer = group.Offer(0, 2);
  offer.instruction_set = "avx512_bf16";
  const absl::Status status = membership.Join(offer).status();
  EXPECT_EQ(ReasonOf(status), ErrorReason::kWrongInstructionSet) << status;
  for (const char* text : {"rank 0", "avx512_bf16", "rank 2", "avx2", "--isa"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
  // The only member may come back with another one; then that is the group's.
  offer = group.Offer(2, 1);
  offer.instruction_set = "portable";
  EXPECT_TRUE(membership.Join(offer).ok());
  offer = group.Offer(0, 2);
  offer.instruction_set = "portable";
  EXPECT_TRUE(membership.Join(offer).ok());
}

TEST(MembershipTest, ARankThatHoldsWeightsAsAnotherTypeIsRefused) {
  Group group(3, 6);
  Membership& membership = group.membership();
  RankOffer offer = group.Offer(2, 1);
  offer.models[0].weight_dtype = DType::kFloat8E4M3;
  ASSERT_TRUE(membership.Join(offer).ok());
  EXPECT_EQ(membership.View()[2].weight_dtypes.at("m"), DType::kFloat8E4M3);
  offer = group.Offer(0, 2);
  offer.models[0].weight_dtype = DType::kBFloat16;
  const absl::Status status = membership.Join(offer).status();
  EXPECT_EQ(ReasonOf(status), ErrorReason::kWrongModel) << status;
  for (const char* text : {"rank 0: holds the experts of model m as bfloat16",
                           "rank 2 as float8_e4m3", "--fp8_weights"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
  // The only member may come back with another one; then that is the group's.
  offer = group.Offer(2, 1);
  offer.models[0].weight_dtype = DType::kBFloat16;
  EXPECT_TRUE(membership.Join(offer).ok());
  offer = group.Offer(0, 2);
  offer.models[0].weight_dtype = DType::kBFloat16;
  EXPECT_TRUE(membership.Join(offer).ok());
}

TEST(MembershipTest, ViewTellsWhoIsLoadingAndWhyOthersWereLost) {
  Group group(2, 6);
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

TEST(MembershipTest, ARefusedRankIsShownUntilItsPlaceIsTakenOrForAWhile) {
  Group group(2, 5);
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

TEST(MembershipTest, ARivalIsShownBesideTheMemberThatHasThePlace) {
  Group group(2, 6);
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

TEST(MembershipTest, AnEpochsEndTellsALeaveAndAStopFromALoss) {
  for (const EpochEndKind kind :
       {EpochEndKind::kLoss, EpochEndKind::kRankLeft, EpochEndKind::kControlPlaneStops}) {
    Group group(2, 6);
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
  Group group(3, 6);
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
  Group group(2, 4);
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
  Group group(2, 4);
  Membership& membership = group.membership();
  const std::vector<uint64_t> ids = group.Stand();
  const uint64_t again = group.JoinAndAttach(1, 101);
  EXPECT_NE(again, ids[1]);
  group.AnswerAll();
  EXPECT_EQ(membership.epoch(), 2u);
}

TEST(MembershipTest, AnEpochThatCannotBeFormedIsTriedAgainLaterAndLater) {
  Group group(2, 4);
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

TEST(MembershipTest, WhyThereIsNoEpochIsTheLastFailureWhereAllAreThere) {
  Group group(3, 6);
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

TEST(MembershipTest, WhoDoesNotFormOrDropAnEpochInTimeDoesNotHoldUpTheOthers) {
  Group group(2, 4);
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

// Ranks that answer in random time, die, fall silent and come back, on a fake clock.
class Simulation {
 public:
  explicit Simulation(uint64_t seed)
      : random_(seed),
        ep_size_(std::uniform_int_distribution<int32_t>(1, 7)(random_)),
        group_(ep_size_, 2 * ep_size_ + 1),
        ranks_(ep_size_) {}

  void Run() {
    for (int32_t rank = 0; rank < ep_size_; ++rank) Restart(rank);
    absl::Time all_well_since = Now();
    for (int i = 0; i < 4000; ++i) {
      if (i % 400 < 150 && Chance(0.02)) {
        Disturb();
        all_well_since = Now();
      }
      const bool all_alive =
          std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.alive; });
      if (!all_alive) all_well_since = Now();
      Step();
      ASSERT_FALSE(::testing::Test::HasFailure());
      // Silent members have been lost for long, and nobody was disturbed.
      if (Now() - all_well_since > kHeartbeatTimeout + absl::Milliseconds(250)) {
        ASSERT_NE(membership().epoch(), 0u) << "after " << Now() - all_well_since;
      }
    }
    EXPECT_GT(num_epochs_, 3);
  }

 private:
  struct Rank {
    bool alive = false;       // its process runs
    uint64_t id = 0;          // of its membership, 0: none
    uint64_t held_epoch = 0;  // has or forms its communicator
    absl::Time restart_at;
  };
  struct Answer {
    absl::Time at;
    MembershipAction action;
  };

  Membership& membership() { return group_.membership(); }
  absl::Time Now() const { return group_.clock.Now(); }
  bool Chance(double p) { return std::bernoulli_distribution(p)(random_); }
  absl::Duration Random(int max_millis) {
    return absl::Milliseconds(std::uniform_int_distribution<int>(1, max_millis)(random_));
  }

  void Restart(int32_t rank) {
    const absl::StatusOr<uint64_t> id = membership().Join(group_.Offer(rank, ++last_instance_));
    if (!id.ok()) {
      EXPECT_EQ(ReasonOf(id.status()), ErrorReason::kRankTaken);
      ranks_[rank].restart_at = Now() + absl::Milliseconds(50);
      return;
    }
    EXPECT_TRUE(membership().Attach(kIncarnation, *id).ok());
    ranks_[rank].alive = true;
    ranks_[rank].held_epoch = 0;
    ranks_[rank].id = *id;
  }

  void Disturb() {
    const int32_t victim = std::uniform_int_distribution<int32_t>(0, ep_size_ - 1)(random_);
    if (Chance(0.3)) {
      membership().EndEpoch(membership().epoch(), absl::DeadlineExceededError("a step was slow"));
      return;
    }
    Rank& rank = ranks_[victim];
    if (!rank.alive) return;
    rank.alive = false;
    rank.restart_at = Now() + Random(500);
    // Else it just falls silent: the control plane must find out by the clock.
    if (Chance(0.5)) membership().Lose(rank.id, absl::UnavailableError("its stream broke"));
  }

  void Step() {
    for (const MembershipAction& action : membership().TakeActions()) {
      Rank& rank = ranks_[action.ep_rank];
      if (action.kind == MembershipAction::Kind::kDrop) {
        if (rank.id == action.member_id) rank.id = 0;
        continue;
      }
      if (action.kind == MembershipAction::Kind::kEnterEpoch) {
        num_epochs_ += action.ep_rank == 0;
        // Nobody that lives may hold an older one.
        for (const Rank& other : ranks_) {
          EXPECT_TRUE(!other.alive || other.held_epoch == 0 || other.held_epoch == action.epoch);
        }
        EXPECT_GT(action.epoch, 0u);
        rank.held_epoch = action.epoch;
      }
      answers_.push_back({Now() + Random(20), action});
    }
    group_.clock.Advance(absl::Milliseconds(10));
    for (size_t i = 0; i < answers_.size();) {
      if (answers_[i].at > Now()) {
        ++i;
        continue;
      }
      const MembershipAction action = answers_[i].action;
      answers_.erase(answers_.begin() + static_cast<ptrdiff_t>(i));
      Rank& rank = ranks_[action.ep_rank];
      if (!rank.alive || rank.id != action.member_id) continue;
      if (action.kind == MembershipAction::Kind::kEnterEpoch) {
        const bool fails = Chance(0.05) && last_disturbed_epoch_ != action.epoch;
        last_disturbed_epoch_ = action.epoch;
        membership().EpochReady(
            action.member_id, action.epoch,
            fails ? absl::UnavailableError("a peer cannot be reached") : absl::OkStatus());
      } else {
        rank.held_epoch = 0;
        membership().EpochDown(action.member_id, action.epoch);
      }
    }
    for (int32_t r = 0; r < ep_size_; ++r) {
      Rank& rank = ranks_[r];
      if (rank.alive) {
        EXPECT_TRUE(membership().Heartbeat(kIncarnation, rank.id).ok());
      } else if (rank.restart_at <= Now()) {
        Restart(r);
      }
    }
    if (membership().next_deadline() <= Now()) membership().Tick();
  }

  std::mt19937_64 random_;
  const int32_t ep_size_;
  Group group_;
  std::vector<Rank> ranks_;
  std::vector<Answer> answers_;
  uint64_t last_instance_ = 0;
  uint64_t last_disturbed_epoch_ = 0;
  int num_epochs_ = 0;
};

TEST(MembershipTest, RandomLossesNeverMixEpochsAndEndInAStandingOne) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Simulation(seed).Run();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace expertmesh
