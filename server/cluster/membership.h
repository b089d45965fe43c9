#ifndef EXPERTMESH_SERVER_CLUSTER_MEMBERSHIP_H_
#define EXPERTMESH_SERVER_CLUSTER_MEMBERSHIP_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/dtype.h"
#include "server/cluster/epoch_end.h"
#include "server/cluster/rank_offer.h"
#include "server/ops/clock.h"

namespace expertmesh {

// "I am coming": a rank that is loading, and no member yet. It claims nothing.
struct RankAnnouncement {
  int32_t ep_rank = 0;
  int32_t ep_size = 0;
  std::string address;  // for people
  std::string instruction_set;
  int64_t memory_used_bytes = 0;
  double load_progress = 0;  // share of its bytes that is read, 0 to 1
};

struct MembershipOptions : ExpectedGroup {
  uint64_t incarnation = 0;
  // A member not heard of for longer is lost.
  absl::Duration heartbeat_timeout = absl::Seconds(5);
  // For all members together to form an epoch's communicator.
  absl::Duration form_timeout = absl::Seconds(10);
  // For a member to say that it dropped an epoch; then it is lost.
  absl::Duration teardown_timeout = absl::Seconds(10);
  // Before another try when an epoch could not be formed; doubled with every failure in a row, up
  // to the second value.
  absl::Duration min_retry_delay = absl::Milliseconds(50);
  absl::Duration max_retry_delay = absl::Seconds(2);
};

// What whoever drives a Membership has to do, in this order.
struct MembershipAction {
  enum class Kind : uint8_t {
    kEnterEpoch,  // tell the member to form epoch `epoch`'s communicator
    kEndEpoch,    // tell the member to drop epoch `epoch`
    kDrop,        // the member is none any more: end its stream
  };
  Kind kind = Kind::kEnterEpoch;
  int32_t ep_rank = 0;
  uint64_t member_id = 0;
  uint64_t epoch = 0;
  EpochEnd end;  // kEndEpoch: of the epoch; kDrop: of the membership
};

enum class MemberState : uint8_t {
  kMissing,      // never heard of
  kLost,         // was a member
  kLeft,         // was a member, and took its leave
  kRefused,      // wanted to be one, and is none since
  kLoading,      // announced itself within the heartbeat's timeout
  kJoined,       // its stream has not come yet
  kStandingBy,   // waits for an epoch
  kForming,      // was told to form one
  kActive,       // its communicator stands
  kTearingDown,  // was told to drop one
};

struct MemberView {
  MemberState state = MemberState::kMissing;
  uint64_t member_id = 0;
  std::string address;
  std::string instruction_set;
  int64_t weight_bytes = 0;
  int64_t num_experts = 0;
  int64_t memory_used_bytes = 0;
  int64_t memory_limit_bytes = 0;
  absl::Duration heartbeat_age;
  double load_progress = 0;                    // 1 for a member
  std::map<std::string, DType> weight_dtypes;  // by model, as loaded; of a member
  // kLost, kLeft, kRefused; of a member, why the last epoch could not be formed, if that is its
  // doing and none has stood since.
  std::string why;
  absl::Duration why_age;  // kLost, kLeft, kRefused: time since then
  // Of a member: why another server was refused that wanted its place in the last minute. One that
  // waits for the place tries twice a second.
  std::string rival_why;
  absl::Duration rival_age;
};

// Who is in the group, and its epochs: pure state, no threads, no I/O. Every function may leave
// actions to be taken with TakeActions. One thread at a time.
//
// An epoch forms when all ep_size ranks stand by; which experts each must hold is fixed by the
// placements, so together they cover every expert. It stands when every member says that its
// communicator does. It ends when a member is lost, cannot form it, or EndEpoch is called; the next
// one forms when every survivor has said that it dropped it (or was lost too). A member lost its
// place when its stream broke or its heartbeat is late; it may join again at any time.
//
// All members have one instruction set, and one type for each model's weights, those of the first:
// kernels of another round otherwise, and bytes must not depend on which rank computed a row.
class Membership {
 public:
  Membership(MembershipOptions options, const Clock* clock);

  // Gives the new member's id. Refused, changing nothing: PROTOCOL_MISMATCH, WRONG_EP_SIZE,
  // INVALID_FIELD (ep_rank), WRONG_MODEL (models, fingerprints, experts, weight types), RANK_TAKEN,
  // WRONG_INSTRUCTION_SET.
  absl::StatusOr<uint64_t> Join(const RankOffer& offer);
  // The member's stream has come: it stands by. STALE_INCARNATION, STALE_EPOCH (no member, or it
  // has a stream).
  absl::Status Attach(uint64_t incarnation, uint64_t member_id);
  // STALE_INCARNATION, STALE_EPOCH (no member any more; why, where that is known): it must join
  // again.
  absl::Status Heartbeat(uint64_t incarnation, uint64_t member_id, int64_t memory_used_bytes = 0);
  // For View alone, which shows it for a while: as the place's state, or beside the member that has
  // the place. What Join and Announce refuse is noted already.
  void NoteRefusal(int32_t ep_rank, const absl::Status& status);
  // For View alone. True if it is the first one, or the first after a silence. WRONG_EP_SIZE,
  // INVALID_FIELD (ep_rank).
  absl::StatusOr<bool> Announce(const RankAnnouncement& announcement);
  // Its stream ended. Nothing for somebody who is no member.
  void Lose(uint64_t member_id, const absl::Status& reason);
  // It took its leave. Likewise.
  void Leave(uint64_t member_id);
  // The control plane stops: nobody is a member any more.
  void Close(const absl::Status& reason);
  // Answers of a member; ignored when they come from the past.
  void EpochReady(uint64_t member_id, uint64_t epoch, const absl::Status& status);
  void EpochDown(uint64_t member_id, uint64_t epoch);
  // A step of it was lost or took too long. Ignored unless `epoch` is forming or stands.
  void EndEpoch(uint64_t epoch, const absl::Status& reason);
  // Looks at the clock. To be called at next_deadline() at the latest.
  void Tick();
  absl::Time next_deadline() const;

  std::vector<MembershipAction> TakeActions();

  // Of the last epoch that has ended.
  const EpochEnd& last_end() const { return last_end_; }
  // The epoch that stands; 0: none.
  uint64_t epoch() const { return phase_ == Phase::kStanding ? epoch_ : 0; }
  // The epoch whose rendezvous keys may be used; 0: none.
  uint64_t forming_epoch() const { return phase_ == Phase::kForming ? epoch_ : 0; }
  std::vector<MemberView> View() const;  // [ep_size]
  // For people: what an epoch waits for, while none stands.
  std::string WhyNoEpoch() const;

 private:
  enum class Phase : uint8_t { kNone, kForming, kStanding, kEnding };
  struct Member {
    uint64_t id = 0;
    uint64_t instance = 0;
    MemberState state = MemberState::kJoined;
    absl::Time last_heard;
    MemberView view;
  };
  // What is known of a place's last member, and of who may be the next.
  struct Visitor {
    std::string lost_why;  // empty: nobody was lost
    uint64_t lost_id = 0;
    bool has_left = false;
    absl::Time lost_at;
    MemberView loading;
    absl::Time announced = absl::InfinitePast();
    std::string refused_why;
    absl::Time refused_at = absl::InfinitePast();
    std::string rival_why;  // of the member that has the place
    absl::Time rival_at = absl::InfinitePast();
  };

  absl::Status CheckInstructionSet(const RankOffer& offer) const;
  absl::Status CheckWeightDTypes(const RankOffer& offer) const;
  absl::StatusOr<uint64_t> TakeMember(const RankOffer& offer);
  absl::StatusOr<int32_t> FindMember(uint64_t incarnation, uint64_t member_id) const;
  void Remove(int32_t ep_rank, const EpochEnd& end);
  void End(const EpochEnd& end);
  // Ends the forming epoch, which these did not come to stand in.
  void FailToForm(absl::Span<const int32_t> ep_ranks, const absl::Status& reason);
  bool AllAre(MemberState state) const;
  std::vector<int32_t> MembersWho(MemberState state) const;
  // From kEnding to kNone when nobody is left to wait for, from kNone to kForming when all are
  // there, from kForming to kStanding when all are ready.
  void Advance();

  const MembershipOptions options_;
  const Clock* const clock_;
  std::vector<std::optional<Member>> members_;  // [ep_size]
  std::vector<Visitor> visitors_;               // [ep_size]
  uint64_t last_member_id_ = 0;
  Phase phase_ = Phase::kNone;
  uint64_t epoch_ = 0;
  absl::Time phase_deadline_ = absl::InfiniteFuture();  // of kForming and kEnding
  absl::Time form_at_ = absl::InfinitePast();           // not before
  int num_failures_ = 0;                                // to form an epoch, in a row
  EpochEnd last_end_;
  std::vector<MembershipAction> actions_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_MEMBERSHIP_H_
