// Random weather over a membership, on a fake clock.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "server/cluster/membership.h"
#include "tests/server/cluster/membership_group.h"

namespace expertmesh {
namespace {

constexpr uint64_t kIncarnation = MembershipGroup::kIncarnation;
constexpr absl::Duration kHeartbeatTimeout = MembershipGroup::kHeartbeatTimeout;

// Ranks that answer in random time, die, fall silent and come back, on a fake clock.
class MembershipSimulation {
 public:
  explicit MembershipSimulation(uint64_t seed)
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
  MembershipGroup group_;
  std::vector<Rank> ranks_;
  std::vector<Answer> answers_;
  uint64_t last_instance_ = 0;
  uint64_t last_disturbed_epoch_ = 0;
  int num_epochs_ = 0;
};

TEST(MembershipSimulationTest, RandomLossesNeverMixEpochsAndEndInAStandingOne) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    MembershipSimulation(seed).Run();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace expertmesh
