#include "server/cluster/membership.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/ops/call_error.h"
#include "server/ops/duration_text.h"
#include "server/ops/few_of.h"
#include "server/ops/rank_text.h"
#include "server/ops/shown_text.h"

namespace expertmesh {
namespace {

constexpr size_t kMaxWhyBytes = 512;
constexpr absl::Duration kRefusalShownFor = absl::Minutes(10);
constexpr absl::Duration kRivalShownFor = absl::Minutes(1);

// "rank 1", "ranks 0, 2 and 37 more".
std::string RanksText(absl::Span<const int32_t> ranks) {
  std::vector<std::string> names;
  for (const int32_t rank : ranks) names.push_back(absl::StrCat(rank));
  return absl::StrCat(names.size() == 1 ? "rank " : "ranks ", FewOf(names));
}

EpochEnd Loss(absl::Status reason) { return {EpochEndKind::kLoss, std::move(reason)}; }

}  // namespace

Membership::Membership(MembershipOptions options, const Clock* clock)
    : options_(std::move(options)),
      clock_(clock),
      members_(options_.ep_size),
      visitors_(options_.ep_size) {}

absl::Status Membership::CheckInstructionSet(const RankOffer& offer) const {
  for (int32_t rank = 0; rank < options_.ep_size; ++rank) {
    if (rank == offer.ep_rank || !members_[rank].has_value()) continue;
    const std::string& other = members_[rank]->view.instruction_set;
    if (other == offer.instruction_set) continue;
    return CallError(
        ErrorReason::kWrongInstructionSet,
        absl::StrCat("rank ", offer.ep_rank, " computes with ", offer.instruction_set, ", rank ",
                     rank, " with ", other,
                     ": a token's bytes would depend on its experts' ranks; start all ranks of the "
                     "group with the same --isa"));
  }
  return absl::OkStatus();
}

absl::Status Membership::CheckWeightDTypes(const RankOffer& offer) const {
  for (int32_t rank = 0; rank < options_.ep_size; ++rank) {
    if (rank == offer.ep_rank || !members_[rank].has_value()) continue;
    for (const ModelManifest& model : offer.models) {
      const DType other = members_[rank]->view.weight_dtypes.at(model.model);
      if (other == model.weight_dtype) continue;
      return WrongModel(
          offer.ep_rank,
          absl::StrCat("holds the experts of model ", model.model, " as ",
                       std::string(DTypeName(model.weight_dtype)), ", rank ", rank, " as ",
                       std::string(DTypeName(other)),
                       ": a token's bytes would depend on its experts' ranks; start all ranks of "
                       "the group with the same --fp8_weights"));
    }
  }
  return absl::OkStatus();
}

void Membership::NoteRefusal(int32_t ep_rank, const absl::Status& status) {
  if (ep_rank < 0 || ep_rank >= options_.ep_size) return;
  Visitor& visitor = visitors_[ep_rank];
  const bool is_taken = members_[ep_rank].has_value();
  (is_taken ? visitor.rival_why : visitor.refused_why) = ShownText(status.message(), kMaxWhyBytes);
  (is_taken ? visitor.rival_at : visitor.refused_at) = clock_->Now();
}

absl::StatusOr<uint64_t> Membership::Join(const RankOffer& offer) {
  absl::StatusOr<uint64_t> id = TakeMember(offer);
  if (!id.ok()) NoteRefusal(offer.ep_rank, id.status());
  return id;
}

absl::StatusOr<uint64_t> Membership::TakeMember(const RankOffer& offer) {
  if (absl::Status status = CheckOffer(offer, options_); !status.ok()) return status;
  std::optional<Member>& place = members_[offer.ep_rank];
  if (place.has_value() && place->instance != offer.instance) {
    return CallError(ErrorReason::kRankTaken,
                     absl::StrCat("rank ", offer.ep_rank, " is taken by ", place->view.address));
  }
  if (absl::Status status = CheckInstructionSet(offer); !status.ok()) return status;
  if (absl::Status status = CheckWeightDTypes(offer); !status.ok()) return status;
  if (place.has_value()) {
    Remove(offer.ep_rank, Loss(absl::UnavailableError("the rank joins again")));
  }
  Member member;
  member.id = ++last_member_id_;
  member.instance = offer.instance;
  member.last_heard = clock_->Now();
  member.view.member_id = member.id;
  member.view.address = offer.address;
  member.view.instruction_set = offer.instruction_set;
  member.view.weight_bytes = offer.weight_bytes;
  member.view.memory_limit_bytes = offer.memory_limit_bytes;
  member.view.load_progress = 1;
  for (const ModelManifest& model : offer.models) {
    member.view.weight_dtypes[model.model] = model.weight_dtype;
    for (const LayerManifest& layer : model.layers) {
      member.view.num_experts += static_cast<int64_t>(layer.expert_ids.size());
    }
  }
  const uint64_t id = member.id;
  place = std::move(member);
  visitors_[offer.ep_rank] = Visitor();
  Advance();
  return id;
}

absl::StatusOr<int32_t> Membership::FindMember(uint64_t incarnation, uint64_t member_id) const {
  if (incarnation != options_.incarnation) {
    return CallError(ErrorReason::kStaleIncarnation,
                     absl::StrCat("incarnation ", incarnation, " is past, this one is ",
                                  options_.incarnation, ": join again"));
  }
  for (int32_t rank = 0; rank < options_.ep_size; ++rank) {
    if (members_[rank].has_value() && members_[rank]->id == member_id) return rank;
  }
  std::string why;
  for (const Visitor& visitor : visitors_) {
    if (visitor.lost_id == member_id) why = visitor.lost_why;
  }
  return CallError(
      ErrorReason::kStaleEpoch,
      why.empty() ? absl::StrCat("member ", member_id, " is none any more: join again") : why);
}

absl::Status Membership::Attach(uint64_t incarnation, uint64_t member_id) {
  const absl::StatusOr<int32_t> rank = FindMember(incarnation, member_id);
  if (!rank.ok()) return rank.status();
  Member& member = *members_[*rank];
  if (member.state != MemberState::kJoined) {
    return CallError(ErrorReason::kStaleEpoch,
                     absl::StrCat("member ", member_id, " has a stream already"));
  }
  member.state = MemberState::kStandingBy;
  Advance();
  return absl::OkStatus();
}

absl::Status Membership::Heartbeat(uint64_t incarnation, uint64_t member_id,
                                   int64_t memory_used_bytes) {
  const absl::StatusOr<int32_t> rank = FindMember(incarnation, member_id);
  if (!rank.ok()) return rank.status();
  members_[*rank]->last_heard = clock_->Now();
  members_[*rank]->view.memory_used_bytes = memory_used_bytes;
  return absl::OkStatus();
}

absl::StatusOr<bool> Membership::Announce(const RankAnnouncement& announcement) {
  if (absl::Status status = CheckPlace(announcement.ep_rank, announcement.ep_size, options_);
      !status.ok()) {
    NoteRefusal(announcement.ep_rank, status);
    return status;
  }
  Visitor& visitor = visitors_[announcement.ep_rank];
  const absl::Time now = clock_->Now();
  const bool is_first = now >= visitor.announced + options_.heartbeat_timeout;
  visitor.announced = now;
  visitor.loading.address = announcement.address;
  visitor.loading.instruction_set = announcement.instruction_set;
  visitor.loading.memory_used_bytes = announcement.memory_used_bytes;
  visitor.loading.load_progress = std::clamp(announcement.load_progress, 0.0, 1.0);
  return is_first;
}

void Membership::Lose(uint64_t member_id, const absl::Status& reason) {
  const absl::StatusOr<int32_t> rank = FindMember(options_.incarnation, member_id);
  if (!rank.ok()) return;
  Remove(*rank, Loss(reason));
  Advance();
}

void Membership::Leave(uint64_t member_id) {
  const absl::StatusOr<int32_t> rank = FindMember(options_.incarnation, member_id);
  if (!rank.ok()) return;
  Remove(*rank, {EpochEndKind::kRankLeft, absl::UnavailableError("it left")});
  Advance();
}

void Membership::Close(const absl::Status& reason) {
  for (int32_t rank = 0; rank < options_.ep_size; ++rank) {
    if (members_[rank].has_value()) Remove(rank, {EpochEndKind::kControlPlaneStops, reason});
  }
  Advance();
}

void Membership::Remove(int32_t ep_rank, const EpochEnd& end) {
  Member& member = *members_[ep_rank];
  const bool was_in_epoch =
      member.state == MemberState::kForming || member.state == MemberState::kActive;
  MembershipAction action;
  action.kind = MembershipAction::Kind::kDrop;
  action.ep_rank = ep_rank;
  action.member_id = member.id;
  action.epoch = epoch_;
  action.end = end;
  visitors_[ep_rank].rival_at = absl::InfinitePast();
  visitors_[ep_rank].lost_id = member.id;
  visitors_[ep_rank].has_left = end.kind == EpochEndKind::kRankLeft;
  visitors_[ep_rank].lost_why = std::string(end.reason.message());
  visitors_[ep_rank].lost_at = clock_->Now();
  members_[ep_rank].reset();
  actions_.push_back(std::move(action));
  if (!was_in_epoch) return;
  switch (end.kind) {
    case EpochEndKind::kLoss:
      return End(Loss(
          CallError(ErrorReason::kStepLost, RankText(ep_rank, "was lost", end.reason.message()))));
    case EpochEndKind::kRankLeft:
      return End(
          {end.kind, CallError(ErrorReason::kStepLost, absl::StrCat("rank ", ep_rank, " left"))});
    case EpochEndKind::kControlPlaneStops:
      return End(end);
  }
}

void Membership::End(const EpochEnd& end) {
  if (phase_ != Phase::kForming && phase_ != Phase::kStanding) return;
  const absl::Time now = clock_->Now();
  if (phase_ == Phase::kForming) {
    const int doublings = std::min(num_failures_++, 16);
    form_at_ =
        now + std::min(options_.min_retry_delay * (1 << doublings), options_.max_retry_delay);
  }
  phase_ = Phase::kEnding;
  last_end_ = end;
  phase_deadline_ = now + options_.teardown_timeout;
  for (int32_t rank = 0; rank < options_.ep_size; ++rank) {
    std::optional<Member>& member = members_[rank];
    if (!member.has_value() ||
        (member->state != MemberState::kForming && member->state != MemberState::kActive)) {
      continue;
    }
    member->state = MemberState::kTearingDown;
    MembershipAction action;
    action.kind = MembershipAction::Kind::kEndEpoch;
    action.ep_rank = rank;
    action.member_id = member->id;
    action.epoch = epoch_;
    action.end = end;
    actions_.push_back(std::move(action));
  }
}

void Membership::FailToForm(absl::Span<const int32_t> ep_ranks, const absl::Status& reason) {
  for (std::optional<Member>& member : members_) {
    if (member.has_value()) member->view.why.clear();
  }
  for (const int32_t rank : ep_ranks) {
    members_[rank]->view.why = ShownText(reason.message(), kMaxWhyBytes);
  }
  End(Loss(reason));
}

void Membership::EpochReady(uint64_t member_id, uint64_t epoch, const absl::Status& status) {
  const absl::StatusOr<int32_t> rank = FindMember(options_.incarnation, member_id);
  if (!rank.ok() || epoch != epoch_ || members_[*rank]->state != MemberState::kForming) return;
  if (status.ok()) {
    members_[*rank]->state = MemberState::kActive;
  } else {
    FailToForm({*rank}, absl::Status(status.code(),
                                     RankText(*rank, absl::StrCat("could not form epoch ", epoch),
                                              status.message())));
  }
  Advance();
}

void Membership::EpochDown(uint64_t member_id, uint64_t epoch) {
  const absl::StatusOr<int32_t> rank = FindMember(options_.incarnation, member_id);
  if (!rank.ok() || epoch != epoch_ || members_[*rank]->state != MemberState::kTearingDown) return;
  members_[*rank]->state = MemberState::kStandingBy;
  Advance();
}

void Membership::EndEpoch(uint64_t epoch, const absl::Status& reason) {
  if (epoch != epoch_) return;
  End(Loss(reason));
  Advance();
}

void Membership::Tick() {
  const absl::Time now = clock_->Now();
  for (int32_t rank = 0; rank < options_.ep_size; ++rank) {
    const std::optional<Member>& member = members_[rank];
    if (!member.has_value() || now < member->last_heard + options_.heartbeat_timeout) continue;
    Remove(rank, Loss(absl::UnavailableError(
                     absl::StrCat("no heartbeat for ", DurationText(now - member->last_heard)))));
  }
  if (now >= phase_deadline_) {
    if (phase_ == Phase::kForming) {
      const std::vector<int32_t> late = MembersWho(MemberState::kForming);
      FailToForm(late, absl::DeadlineExceededError(absl::StrCat(
                           "epoch ", epoch_, " was not formed in ",
                           absl::FormatDuration(options_.form_timeout), " by ", RanksText(late))));
    } else if (phase_ == Phase::kEnding) {
      for (int32_t rank = 0; rank < options_.ep_size; ++rank) {
        if (members_[rank].has_value() && members_[rank]->state == MemberState::kTearingDown) {
          Remove(rank, Loss(absl::DeadlineExceededError(
                           absl::StrCat("it did not drop epoch ", epoch_, " in ",
                                        absl::FormatDuration(options_.teardown_timeout)))));
        }
      }
    }
  }
  Advance();
}

bool Membership::AllAre(MemberState state) const {
  return std::all_of(members_.begin(), members_.end(), [state](const auto& member) {
    return member.has_value() && member->state == state;
  });
}

std::vector<int32_t> Membership::MembersWho(MemberState state) const {
  std::vector<int32_t> ranks;
  for (int32_t rank = 0; rank < options_.ep_size; ++rank) {
    if (members_[rank].has_value() && members_[rank]->state == state) ranks.push_back(rank);
  }
  return ranks;
}

void Membership::Advance() {
  if (phase_ == Phase::kForming && AllAre(MemberState::kActive)) {
    phase_ = Phase::kStanding;
    phase_deadline_ = absl::InfiniteFuture();
    num_failures_ = 0;
    form_at_ = absl::InfinitePast();
    for (std::optional<Member>& member : members_) member->view.why.clear();
  }
  if (phase_ == Phase::kEnding &&
      std::none_of(members_.begin(), members_.end(), [](const auto& member) {
        return member.has_value() && member->state == MemberState::kTearingDown;
      })) {
    phase_ = Phase::kNone;
    phase_deadline_ = absl::InfiniteFuture();
  }
  const absl::Time now = clock_->Now();
  if (phase_ != Phase::kNone || now < form_at_ || !AllAre(MemberState::kStandingBy)) return;
  phase_ = Phase::kForming;
  phase_deadline_ = now + options_.form_timeout;
  ++epoch_;
  for (int32_t rank = 0; rank < options_.ep_size; ++rank) {
    members_[rank]->state = MemberState::kForming;
    MembershipAction action;
    action.kind = MembershipAction::Kind::kEnterEpoch;
    action.ep_rank = rank;
    action.member_id = members_[rank]->id;
    action.epoch = epoch_;
    actions_.push_back(std::move(action));
  }
}

absl::Time Membership::next_deadline() const {
  absl::Time next = phase_deadline_;
  for (const std::optional<Member>& member : members_) {
    if (member.has_value()) next = std::min(next, member->last_heard + options_.heartbeat_timeout);
  }
  if (phase_ == Phase::kNone && AllAre(MemberState::kStandingBy)) next = std::min(next, form_at_);
  return next;
}

std::vector<MembershipAction> Membership::TakeActions() { return std::exchange(actions_, {}); }

std::string Membership::WhyNoEpoch() const {
  const std::string* failure = nullptr;
  for (const std::optional<Member>& member : members_) {
    if (!member.has_value()) return "not all ranks are there";
    if (failure == nullptr && !member->view.why.empty()) failure = &member->view.why;
  }
  if (failure != nullptr) return absl::StrCat("all ranks are there, but ", *failure);
  if (const std::vector<int32_t> late = MembersWho(MemberState::kTearingDown); !late.empty()) {
    return absl::StrCat("all ranks are there, the last epoch is being left by ", RanksText(late));
  }
  return "all ranks are there, an epoch forms";
}

std::vector<MemberView> Membership::View() const {
  std::vector<MemberView> views(options_.ep_size);
  const absl::Time now = clock_->Now();
  for (int32_t rank = 0; rank < options_.ep_size; ++rank) {
    MemberView& view = views[rank];
    const Visitor& visitor = visitors_[rank];
    if (members_[rank].has_value()) {
      view = members_[rank]->view;
      view.state = members_[rank]->state;
      view.heartbeat_age = now - members_[rank]->last_heard;
      if (now < visitor.rival_at + kRivalShownFor) {
        view.rival_why = visitor.rival_why;
        view.rival_age = now - visitor.rival_at;
      }
    } else if (now < visitor.announced + options_.heartbeat_timeout &&
               visitor.announced > visitor.refused_at) {
      view = visitor.loading;
      view.state = MemberState::kLoading;
      view.heartbeat_age = now - visitor.announced;
    } else if (now < visitor.refused_at + kRefusalShownFor) {
      view.state = MemberState::kRefused;
      view.why = visitor.refused_why;
      // A stranger must not hide it.
      if (!visitor.lost_why.empty() && !visitor.has_left) {
        absl::StrAppend(&view.why,
                        "; before that it was lost: ", ShownText(visitor.lost_why, kMaxWhyBytes));
      }
      view.why_age = now - visitor.refused_at;
    } else if (!visitor.lost_why.empty()) {
      view.state = visitor.has_left ? MemberState::kLeft : MemberState::kLost;
      view.why = visitor.lost_why;
      view.why_age = now - visitor.lost_at;
    }
  }
  return views;
}

}  // namespace expertmesh
