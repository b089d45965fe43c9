#ifndef EXPERTMESH_TESTS_SERVER_CLUSTER_MEMBERSHIP_GROUP_H_
#define EXPERTMESH_TESTS_SERVER_CLUSTER_MEMBERSHIP_GROUP_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "server/cluster/membership.h"
#include "server/ops/call_error.h"
#include "tests/server/control/fake_clock.h"

namespace expertmesh {

// A membership of a model "m" with one layer (index 3), and what its ranks offer.
class MembershipGroup {
 public:
  static constexpr uint64_t kIncarnation = 0xfeed;
  static constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2);

  MembershipGroup(int32_t ep_size, int32_t num_experts)
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

inline ErrorReason ReasonOf(const absl::Status& status) {
  const std::optional<CallErrorDetails> details = GetCallErrorDetails(status);
  return details.has_value() ? details->reason : ErrorReason::kInternalError;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_CLUSTER_MEMBERSHIP_GROUP_H_
