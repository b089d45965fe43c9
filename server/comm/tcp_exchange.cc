#include "server/comm/tcp_exchange.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/ops/rank_text.h"
#include "server/ops/start_thread.h"

namespace expertmesh {
namespace {

// A rank that gives up says so before it closes its connections, but on another connection than the
// one that broke: this long for the words to arrive.
constexpr std::chrono::seconds kPatienceForReason{1};

// A rank may leave once it has finished an operation, and its last bytes be overtaken by its
// farewell: this long for them to arrive, so that the others finish too.
constexpr std::chrono::milliseconds kPatienceForLastBytes{100};

}  // namespace

TcpExchange::TcpExchange(int32_t ep_rank, std::vector<TcpPeerSockets> peers,
                         absl::Duration operation_timeout)
    : ep_rank_(ep_rank),
      operation_timeout_(absl::ToChronoNanoseconds(
          std::clamp(operation_timeout, absl::ZeroDuration(), absl::Hours(1000)))),
      traffic_(static_cast<int32_t>(peers.size())) {
  for (TcpPeerSockets& sockets : peers) links_.emplace_back(std::move(sockets));
  if (ep_size() == 1) return;  // nobody to wait for
  if (const absl::Status status = WatchSockets(); !status.ok()) {
    BreakLocked(status);
    return;
  }
  absl::StatusOr<std::thread> started = StartThread([this] { Run(); });
  if (!started.ok()) {
    BreakLocked(started.status());
    return;
  }
  thread_ = *std::move(started);
}

absl::Status TcpExchange::WatchSockets() {
  absl::Status status = watch_.Open();
  for (int32_t rank = 0; rank < ep_size() && status.ok(); ++rank) {
    if (rank == ep_rank_) continue;
    const auto key = static_cast<uint64_t>(rank) * 2;
    status = watch_.Add(links_[rank].data.fd(), EPOLLIN | EPOLLOUT | EPOLLRDHUP, key);
    status.Update(watch_.Add(links_[rank].notices.fd(), EPOLLIN | EPOLLRDHUP, key + 1));
  }
  return status;
}

absl::Status TcpExchange::broken() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return broken_;
}

absl::Status TcpExchange::Start(OperationPlace place, std::shared_ptr<TcpOperation> operation) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!broken_.ok()) return broken_;
  if (absl::Status added = started_.Add(place, std::move(operation), ep_rank_); !added.ok()) {
    BreakLocked(added);
  }
  Proceed();
  const absl::Status status = broken_;
  Signals signals = std::exchange(signals_, {});
  lock.unlock();
  Signal(signals);
  return status;
}

void TcpExchange::CloseOrder(int64_t order, int64_t num_operations) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!broken_.ok()) return;
  started_.Close(order, num_operations);
  Proceed();
  Signals signals = std::exchange(signals_, {});
  lock.unlock();
  Signal(signals);
}

void TcpExchange::Proceed() {
  if (current_ != nullptr || !broken_.ok()) return;
  BeginNext();
  Advance();
  if (current_ != nullptr) WakeBy(deadline_);
  if (CanMove()) watch_.Wake();
}

void TcpExchange::Break(const absl::Status& status) {
  ++num_breaking_;
  std::unique_lock<std::mutex> lock(mutex_);
  --num_breaking_;
  BreakLocked(status);
  Signals signals = std::exchange(signals_, {});
  lock.unlock();
  Signal(signals);
}

void TcpExchange::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (thread_.joinable()) watch_.Wake();
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Link& link : links_) {
    link.data.Close();
    link.notices.Close();
  }
  watch_.Close();
}

void TcpExchange::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    // Without an operation, an alarm that is set already stays, so that the next operation, whose
    // deadline is later, need not wake this thread to set one.
    const Time deadline = NextDeadline();
    if (deadline != Time::max() || alarm_ <= std::chrono::steady_clock::now()) alarm_ = deadline;
    wake_at_ = alarm_;
    int timeout_millis = -1;
    if (wake_at_ != Time::max()) {
      const auto remaining =
          std::chrono::ceil<std::chrono::milliseconds>(wake_at_ - std::chrono::steady_clock::now());
      timeout_millis = static_cast<int>(std::clamp<int64_t>(remaining.count(), 0, 1000000));
    }
    // Break waits for the mutex, so Advance let go of it: only look, do not sleep.
    if (CanMove()) timeout_millis = 0;
    lock.unlock();
    const absl::Span<const epoll_event> events = watch_.Wait(timeout_millis);
    lock.lock();
    wake_at_ = Time::min();  // awake
    for (const epoll_event& event : events) HandleSocket(event.data.u64, event.events);
    Advance();
    CheckTime();
    if (!signals_.empty()) {
      Signals signals = std::exchange(signals_, {});
      lock.unlock();
      Signal(signals);
      lock.lock();
    }
  }
}

void TcpExchange::WakeBy(Time time) {
  if (time >= wake_at_) return;
  wake_at_ = time;
  if (thread_.joinable()) watch_.Wake();
}

TcpExchange::Time TcpExchange::NextDeadline() const {
  if (!broken_.ok()) return Time::max();
  return std::min(current_ == nullptr ? Time::max() : deadline_, loss_deadline_);
}

// True if Advance has something to do without waiting for a socket.
bool TcpExchange::CanMove() const {
  if (!broken_.ok()) return false;
  if (current_ == nullptr) return started_.Next() != nullptr;
  return std::any_of(links_.begin(), links_.end(), [](const Link& link) {
    return !link.failed &&
           ((!link.data.sent() && link.writable) || (!link.data.received() && link.readable));
  });
}

void TcpExchange::HandleSocket(uint64_t key, uint32_t events) {
  const auto rank = static_cast<int32_t>(key / 2);
  Link& link = links_[rank];
  if (key % 2 == 1) {
    ReadNotice(rank);
    return;
  }
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) link.readable = true;
  if ((events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0) link.writable = true;
}

void TcpExchange::ReadNotice(int32_t rank) {
  if (!broken_.ok()) return;
  const std::optional<absl::Status> reason = links_[rank].notices.Hear(rank);
  if (!reason.has_value()) return;
  if (absl::IsUnavailable(*reason)) {
    PeerLeft(links_[rank], *reason);
  } else {
    BreakLocked(*reason);
  }
}

void TcpExchange::PeerLeft(Link& link, const absl::Status& status) {
  if (link.failed) {
    BreakLocked(status);  // it will send nothing more
  } else if (!link.left) {
    link.left = true;
    Lose(status, kPatienceForLastBytes);
  }
}

// The exchange will break with `status`, unless a better reason comes: as soon as no operation is
// left that might still end well, but at the latest after `patience`.
void TcpExchange::Lose(const absl::Status& status, std::chrono::nanoseconds patience) {
  if (loss_.ok()) loss_ = status;
  loss_deadline_ = std::min(loss_deadline_, std::chrono::steady_clock::now() + patience);
  WakeBy(loss_deadline_);
}

// Makes the next operation, if it has been started, the current one.
void TcpExchange::BeginNext() {
  current_ = started_.TakeNext();
  if (current_ == nullptr) return;
  const TcpOperation& operation = *current_;
  begun_ = std::chrono::steady_clock::now();
  deadline_ = begun_ + operation_timeout_;
  if (absl::Status status = operation.CopyOwnBlock(); !status.ok()) {
    BreakLocked(status);
    return;
  }
  imbalance_ = operation.Imbalance();
  const std::vector<int64_t> send_offsets = operation.SendOffsets();
  const std::vector<int64_t> receive_offsets = operation.ReceiveOffsets();
  for (int32_t rank = 0; rank < ep_size(); ++rank) {
    if (rank == ep_rank_) continue;
    Link& link = links_[rank];
    TcpMessageHeader header = operation.Header(rank);
    header.imbalance = imbalance_;
    link.data.BeginSend(header, operation.send + send_offsets[rank], operation.send_bytes[rank]);
    link.data.BeginReceive(operation.receive + receive_offsets[rank],
                           operation.receive_bytes[rank]);
    link.checked = false;
  }
}

// Gives every peer a turn after the other, as long as anything moves.
void TcpExchange::Advance() {
  while (true) {
    if (current_ == nullptr) BeginNext();
    bool moved = false;
    for (int32_t rank = 0; rank < ep_size(); ++rank) {
      if (current_ == nullptr || !broken_.ok()) return;
      if (rank != ep_rank_ && AdvanceLink(rank)) moved = true;
    }
    if (current_ == nullptr || !broken_.ok()) return;
    FinishIfComplete();
    // What has ended is told before the next operation's bytes are moved: by the own thread, where
    // there is one.
    if (!signals_.empty() && thread_.joinable()) return;
    if (current_ != nullptr && !moved) return;
    if (num_breaking_.load(std::memory_order_relaxed) > 0) return;
  }
}

// True if bytes went either way.
bool TcpExchange::AdvanceLink(int32_t rank) {
  Link& link = links_[rank];
  if (link.failed) return false;
  const auto failed = [&](const absl::Status& status) {
    link.failed = true;
    if (link.left) {
      BreakLocked(loss_);
    } else {
      Lose(absl::UnavailableError(RankText(rank, "is lost", status.message())), kPatienceForReason);
    }
  };
  bool moved = false;
  if (link.writable && !link.data.sent()) {
    const absl::StatusOr<bool> sent = link.data.Send();
    if (!sent.ok()) {
      failed(sent.status());
      return false;
    }
    if (!*sent) link.writable = false;
    moved |= *sent;
  }
  if (link.readable && !link.data.received()) {
    const absl::StatusOr<bool> received = link.data.Receive();
    if (!received.ok()) {
      failed(received.status());
      return false;
    }
    if (!*received) link.readable = false;
    moved |= *received;
  }
  if (link.data.header_received() && !link.data.header_checked()) {
    if (absl::Status status = current_->CheckHeader(link.data.header(), rank); !status.ok()) {
      BreakLocked(status);
      return false;
    }
    link.data.set_header_checked();
    imbalance_ += link.data.header().imbalance;
  }
  if (link.data.received() && !link.checked) {
    if (!link.data.checksum_matches()) {
      BreakLocked(
          absl::DataLossError(absl::StrCat("checksum differs of what rank ", rank, " sent to rank ",
                                           ep_rank_, " in ", current_->ToString())));
      return false;
    }
    link.checked = true;
    const std::chrono::nanoseconds wait = std::chrono::steady_clock::now() - begun_;
    traffic_.CountWait(rank, wait.count());
  }
  return moved;
}

void TcpExchange::FinishIfComplete() {
  for (int32_t rank = 0; rank < ep_size(); ++rank) {
    if (rank != ep_rank_ && !(links_[rank].checked && links_[rank].data.sent())) return;
  }
  if (imbalance_ != 0) {
    BreakLocked(absl::DataLossError(
        absl::StrCat("two other ranks disagree on a count in ", current_->ToString())));
    return;
  }
  signals_.emplace_back(current_->done, absl::OkStatus());
  current_ = nullptr;
  if (!loss_.ok()) BreakLocked(loss_);
}

std::string TcpExchange::Unfinished() const {
  std::string ranks;
  for (int32_t rank = 0; rank < ep_size(); ++rank) {
    if (rank == ep_rank_ || (links_[rank].checked && links_[rank].data.sent())) continue;
    absl::StrAppend(&ranks, ranks.empty() ? "" : ", ", rank);
  }
  return ranks;
}

void TcpExchange::CheckTime() {
  if (!broken_.ok()) return;
  const Time now = std::chrono::steady_clock::now();
  if (!loss_.ok() && (current_ == nullptr || now >= loss_deadline_)) {
    BreakLocked(loss_);
  } else if (current_ != nullptr && now >= deadline_) {
    BreakLocked(absl::DeadlineExceededError(
        absl::StrCat("rank ", ep_rank_, " still waits for ranks ", Unfinished(), " after ",
                     absl::FormatDuration(absl::FromChrono(operation_timeout_)), ", in ",
                     current_->ToString())));
  }
}

void TcpExchange::BreakLocked(const absl::Status& status) {
  if (!broken_.ok()) return;
  broken_ = status;
  for (const Link& link : links_) link.notices.Say(status);
  if (current_ != nullptr) signals_.emplace_back(std::exchange(current_, nullptr)->done, status);
  for (Event& done : started_.DoneEvents()) signals_.emplace_back(std::move(done), status);
  started_.clear();
}

void TcpExchange::Signal(Signals& signals) {
  for (auto& [event, status] : signals) event.Signal(std::move(status));
  signals.clear();
}

}  // namespace expertmesh
