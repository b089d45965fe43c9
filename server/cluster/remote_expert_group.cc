#include "server/cluster/remote_expert_group.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/cluster/incarnation.h"
#include "server/ops/call_error.h"
#include "server/ops/logging.h"
#include "server/ops/start_thread.h"

namespace expertmesh {
namespace {

using Placements = std::map<std::string, std::map<int32_t, Placement>, std::less<>>;

constexpr absl::Duration kTimeToSayWhy = absl::Seconds(2);

absl::Status StopReason() {
  return CallError(ErrorReason::kDraining, "the control plane is stopping");
}

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteExpertGroup>> RemoteExpertGroup::Create(
    const RemoteExpertGroupOptions& options, absl::Span<const ModelSpec* const> models,
    Clock* clock) {
  if (options.ep_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("ep_size: ", options.ep_size, " must be at least 1"));
  }
  RemoteExpertGroupOptions own_options = options;
  if (own_options.allocator == nullptr) own_options.allocator = std::make_shared<HostBufferPool>();
  Placements placements;
  MembershipOptions membership;
  membership.incarnation = NewIncarnation();
  membership.ep_size = options.ep_size;
  membership.heartbeat_timeout = options.heartbeat_timeout;
  // Later than the ranks give up, so that they come to say why.
  membership.form_timeout = options.form_timeout + kDeviceConnectTimeout + kTimeToSayWhy;
  membership.teardown_timeout = options.teardown_timeout;
  for (const ModelSpec* model : models) {
    ExpectedModel expected;
    expected.name = model->name;
    expected.fingerprint = model->fingerprint;
    for (const LayerSpec& layer : model->layers) {
      absl::StatusOr<Placement> placement =
          Placement::Contiguous(layer.num_experts, options.ep_size);
      if (!placement.ok()) return placement.status();
      // Stays where it is when the maps are moved.
      expected.layers[layer.index] =
          &placements[model->name].emplace(layer.index, *std::move(placement)).first->second;
    }
    membership.models.push_back(std::move(expected));
  }
  // Until an epoch stands, whose ranks' own is taken.
  absl::StatusOr<std::unique_ptr<DirectStep>> direct =
      DirectStep::Create(SupportedCpuIsas().back(), own_options.allocator);
  if (!direct.ok()) return direct.status();
  std::unique_ptr<RemoteExpertGroup> group(new RemoteExpertGroup(
      std::move(own_options), std::move(placements), std::move(membership), clock));
  for (const ModelSpec* model : models) group->hidden_sizes_[model->name] = model->hidden_size;
  group->direct_ = *std::move(direct);
  absl::StatusOr<std::thread> started = StartThread([own = group.get()] { own->WatchClock(); });
  if (!started.ok()) return started.status();
  group->clock_thread_ = *std::move(started);
  return group;
}

RemoteExpertGroup::RemoteExpertGroup(RemoteExpertGroupOptions options, Placements placements,
                                     MembershipOptions membership_options, Clock* clock)
    : options_(std::move(options)),
      incarnation_(membership_options.incarnation),
      placements_(std::move(placements)),
      clock_(clock),
      usage_(options_.ep_size),
      refusals_(clock),
      membership_(std::move(membership_options), clock),
      ranks_(options_.ep_size),
      stream_members_(options_.ep_size) {}

RemoteExpertGroup::~RemoteExpertGroup() {
  Close();
  if (clock_thread_.joinable()) clock_thread_.join();
}

void RemoteExpertGroup::SetEpochListener(std::function<void(uint64_t epoch)> listener) {
  const std::lock_guard<std::mutex> lock(mutex_);
  listener_ = std::move(listener);
}

const Placement* RemoteExpertGroup::placement(std::string_view model, int32_t layer) const {
  const auto layers = placements_.find(model);
  if (layers == placements_.end()) return nullptr;
  const auto found = layers->second.find(layer);
  return found == layers->second.end() ? nullptr : &found->second;
}

void RemoteExpertGroup::WatchClock() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closed_) {
    const absl::Time deadline = membership_.next_deadline();
    if (clock_->Now() < deadline) {
      clock_->WaitUntil(clock_cv_, lock, deadline);
      continue;
    }
    membership_.Tick();
    Act(lock);
  }
}

void RemoteExpertGroup::PlanOrder(const MembershipAction& action) {
  // Who joins again has another stream by now.
  std::shared_ptr<RemoteRank>& place = ranks_[action.ep_rank];
  const bool is_there = stream_members_[action.ep_rank] == action.member_id;
  std::shared_ptr<RemoteRank> rank = is_there ? place : nullptr;
  switch (action.kind) {
    case MembershipAction::Kind::kEnterEpoch:
      orders_.push_back([this, rank = std::move(rank), epoch = action.epoch] {
        if (rank == nullptr) return;
        rank->EnterEpoch(incarnation_, epoch, options_.form_timeout, options_.step_timeout);
      });
      return;
    case MembershipAction::Kind::kEndEpoch:
      orders_.push_back([rank = std::move(rank), epoch = action.epoch, end = action.end] {
        if (rank != nullptr) rank->EndEpoch(epoch, end);
      });
      return;
    case MembershipAction::Kind::kDrop:
      switch (action.end.kind) {
        case EpochEndKind::kLoss:
          LogWarning("a rank was lost", {{"ep_rank", action.ep_rank},
                                         {"member", action.member_id},
                                         {"why", action.end.reason.message()}});
          break;
        case EpochEndKind::kRankLeft:
          LogInfo("a rank left", {{"ep_rank", action.ep_rank}, {"member", action.member_id}});
          break;
        case EpochEndKind::kControlPlaneStops:
          break;
      }
      if (is_there) {
        place.reset();
        stream_members_[action.ep_rank] = 0;
      }
      orders_.push_back([rank = std::move(rank), reason = action.end.reason] {
        if (rank != nullptr) rank->Close(reason);
      });
      return;
  }
}

void RemoteExpertGroup::Act(std::unique_lock<std::mutex>& lock) {
  for (const MembershipAction& action : membership_.TakeActions()) PlanOrder(action);
  const EpochEnd& end = membership_.last_end();
  const LogLevel level =
      end.kind == EpochEndKind::kControlPlaneStops ? LogLevel::kInfo : LogLevel::kWarning;
  const uint64_t forming = membership_.forming_epoch();
  if (const uint64_t formed = std::exchange(forming_epoch_, forming);
      formed != 0 && formed != forming) {
    if (membership_.epoch() != formed) {
      Log(level, "an epoch did not come to stand",
          {{"epoch", formed}, {"why", end.reason.message()}});
    }
    // Its secrets are of no use any more, and nobody may wait for them.
    orders_.push_back(
        [this, formed] { rendezvous_.RemovePrefix(RendezvousPrefix(incarnation_, formed)); });
  }
  const uint64_t epoch = membership_.epoch();
  if (const uint64_t last = epoch_.exchange(epoch, std::memory_order_acq_rel); last != epoch) {
    if (last != 0) {
      Log(level, "an epoch ended", {{"epoch", last}, {"why", end.reason.message()}});
      for (const std::shared_ptr<RunningStep>& run : running_) {
        orders_.push_back([run, lost = CallError(ErrorReason::kStepLost, end.reason.message())] {
          run->OnLost(lost);
        });
      }
    }
    if (epoch != 0) {
      usage_.BeginEpoch(clock_->Now());
      const MemberView first = membership_.View().front();
      TakeInstructionSet(first.instruction_set);
      weight_dtypes_ = {first.weight_dtypes.begin(), first.weight_dtypes.end()};
      LogInfo("an epoch stands",
              {{"epoch", epoch}, {"ranks", options_.ep_size}, {"isa", instruction_set_}});
    }
    if (listener_) {
      orders_.push_back([this, epoch] { listener_(epoch); });
    }
  }
  clock_cv_.notify_one();
  if (acting_) return;
  acting_ = true;
  while (!orders_.empty()) {
    absl::AnyInvocable<void()> order = std::move(orders_.front());
    orders_.pop_front();
    lock.unlock();
    order();
    order = nullptr;  // may be the last to hold a stream
    lock.lock();
  }
  acting_ = false;
}

absl::StatusOr<uint64_t> RemoteExpertGroup::Join(const RankOffer& offer) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) return StopReason();
  absl::StatusOr<uint64_t> member_id = membership_.Join(offer);
  Act(lock);
  lock.unlock();
  if (member_id.ok()) {
    refusals_.TellDue();
    LogInfo("a rank joined", {{"ep_rank", offer.ep_rank},
                              {"member", *member_id},
                              {"address", offer.address},
                              {"isa", offer.instruction_set}});
  } else {
    refusals_.Add(offer.ep_rank, offer.address, member_id.status().message());
  }
  return member_id;
}

absl::Status RemoteExpertGroup::Attach(uint64_t incarnation, uint64_t member_id,
                                       std::shared_ptr<RemoteRank> rank) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) return StopReason();
  const int32_t ep_rank = rank->ep_rank();
  const std::vector<MemberView> members = membership_.View();
  if (ep_rank < 0 || ep_rank >= options_.ep_size ||
      (incarnation == incarnation_ && members[ep_rank].member_id != member_id)) {
    return CallError(ErrorReason::kStaleEpoch,
                     absl::StrCat("member ", member_id, " is not rank ", ep_rank, ": join again"));
  }
  if (absl::Status status = membership_.Attach(incarnation, member_id); !status.ok()) {
    return status;
  }
  ranks_[ep_rank] = std::move(rank);
  stream_members_[ep_rank] = member_id;
  Act(lock);
  return absl::OkStatus();
}

absl::Status RemoteExpertGroup::Heartbeat(uint64_t incarnation, uint64_t member_id,
                                          int64_t memory_used_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Nobody is a member of a group that is closed; why is said by each rank's stream alone, lest
  // two words of it race.
  if (closed_) return absl::OkStatus();
  return membership_.Heartbeat(incarnation, member_id, memory_used_bytes);
}

absl::Status RemoteExpertGroup::Announce(const RankAnnouncement& announcement) {
  absl::StatusOr<bool> is_first;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_first = membership_.Announce(announcement);
  }
  if (is_first.ok() && *is_first) {
    LogInfo("a rank is loading", {{"ep_rank", announcement.ep_rank},
                                  {"address", announcement.address},
                                  {"isa", announcement.instruction_set}});
  }
  return is_first.status();
}

void RemoteExpertGroup::NoteRefusal(int32_t ep_rank, const std::string& address,
                                    const absl::Status& status) {
  refusals_.Add(ep_rank, address, status.message());
  const std::lock_guard<std::mutex> lock(mutex_);
  membership_.NoteRefusal(ep_rank, status);
}

std::string RemoteExpertGroup::instruction_set() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return instruction_set_;
}

std::string RemoteExpertGroup::WhyNoEpoch() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return membership_.WhyNoEpoch();
}

DType RemoteExpertGroup::weight_dtype(std::string_view model) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = weight_dtypes_.find(model);
  return found == weight_dtypes_.end() ? DType::kInvalid : found->second;
}

void RemoteExpertGroup::TakeInstructionSet(const std::string& instruction_set) {
  if (instruction_set == instruction_set_) return;
  instruction_set_ = instruction_set;
  for (const CpuIsa isa : SupportedCpuIsas()) {
    if (instruction_set != CpuIsaName(isa)) continue;
    absl::StatusOr<std::unique_ptr<DirectStep>> direct =
        DirectStep::Create(isa, options_.allocator);
    if (!direct.ok()) break;
    direct_ = *std::move(direct);
    return;
  }
  // A GPU's sums have the bytes of every CPU's.
  if (absl::StartsWith(instruction_set, "sm_")) return;
  LogWarning(
      "this machine lacks the ranks' instruction set: the last sum of direct steps is its own",
      {{"isa", instruction_set}});
}

void RemoteExpertGroup::OnEpochReady(uint64_t member_id, uint64_t epoch,
                                     const absl::Status& status) {
  std::unique_lock<std::mutex> lock(mutex_);
  membership_.EpochReady(member_id, epoch, status);
  Act(lock);
}

void RemoteExpertGroup::OnEpochDown(uint64_t member_id, uint64_t epoch) {
  std::unique_lock<std::mutex> lock(mutex_);
  membership_.EpochDown(member_id, epoch);
  Act(lock);
}

void RemoteExpertGroup::OnStreamEnded(uint64_t member_id, const absl::Status& reason) {
  std::unique_lock<std::mutex> lock(mutex_);
  membership_.Lose(member_id, reason);
  Act(lock);
}

void RemoteExpertGroup::OnLeave(uint64_t member_id) {
  std::unique_lock<std::mutex> lock(mutex_);
  membership_.Leave(member_id);
  Act(lock);
}

void RemoteExpertGroup::EndEpoch(uint64_t epoch, const absl::Status& reason) {
  std::unique_lock<std::mutex> lock(mutex_);
  membership_.EndEpoch(epoch, reason);
  Act(lock);
}

absl::Status RemoteExpertGroup::CheckForming(uint64_t incarnation, uint64_t epoch) const {
  if (incarnation != incarnation_) {
    return CallError(ErrorReason::kStaleIncarnation,
                     absl::StrCat("incarnation ", incarnation, " is past: join again"));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (epoch == 0 || epoch != membership_.forming_epoch()) {
    return CallError(ErrorReason::kStaleEpoch, absl::StrCat("epoch ", epoch, " is not forming"));
  }
  return absl::OkStatus();
}

std::vector<MemberView> RemoteExpertGroup::Members() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return membership_.View();
}

void RemoteExpertGroup::Close() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) return;
  closed_ = true;
  membership_.Close(StopReason());
  Act(lock);
}

}  // namespace expertmesh
