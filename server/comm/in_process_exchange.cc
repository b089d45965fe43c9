#include "server/comm/in_process_exchange.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace expertmesh {

InProcessExchange::InProcessExchange(int32_t ep_size, CopyBytes copy_bytes)
    : ep_size_(ep_size), copy_bytes_(std::move(copy_bytes)) {
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    traffic_.push_back(std::make_unique<CommTraffic>(ep_size));
  }
}

absl::Status InProcessExchange::broken() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return broken_;
}

absl::Status InProcessExchange::CheckPair(const CollectiveCall& a, const CollectiveCall& b) {
  if (a.kind != b.kind || !(a.tag == b.tag)) {
    return absl::DataLossError(absl::StrCat("rank ", a.ep_rank, " is at ", a.ToString(), ", rank ",
                                            b.ep_rank, " at ", b.ToString()));
  }
  const auto check_way = [](const CollectiveCall& from, const CollectiveCall& to) {
    const int64_t sent = from.send_bytes[to.ep_rank];
    const int64_t expected = to.receive_bytes[from.ep_rank];
    if (sent == expected) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("rank ", from.ep_rank, " sends ", sent,
                                            " bytes to rank ", to.ep_rank, ", which expects ",
                                            expected, ", in ", from.ToString()));
  };
  absl::Status status = check_way(a, b);
  status.Update(check_way(b, a));
  return status;
}

absl::Status InProcessExchange::CopyBlock(const Participant& from, const Participant& to) const {
  const int32_t from_rank = from.call.ep_rank;
  const int32_t to_rank = to.call.ep_rank;
  const int64_t size_bytes = from.call.send_bytes[to_rank];
  if (size_bytes == 0) return absl::OkStatus();
  const std::byte* const send = from.call.send + from.send_offsets[to_rank];
  std::byte* const receive = to.call.receive + to.receive_offsets[from_rank];
  if (copy_bytes_) return copy_bytes_(receive, send, size_bytes);
  std::memcpy(receive, send, static_cast<size_t>(size_bytes));
  return absl::OkStatus();
}

absl::Status InProcessExchange::Arrive(OperationPlace place, const CollectiveCall& call) {
  const int32_t ep_rank = call.ep_rank;
  std::vector<int64_t> send_offsets = call.SendOffsets();
  std::vector<int64_t> receive_offsets = call.ReceiveOffsets();
  std::vector<Event> finished;
  std::vector<int32_t> peers;
  Operation* operation = nullptr;
  absl::Status mismatch;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.ok()) return broken_;
    operation = &operations_[place];
    operation->participants.resize(ep_size_);
    Participant& self = operation->participants[ep_rank];
    self.arrived = true;
    self.call = call;
    self.arrived_at = std::chrono::steady_clock::now();
    self.num_missing = ep_size_;
    self.send_offsets = std::move(send_offsets);
    self.receive_offsets = std::move(receive_offsets);
    for (int32_t peer = 0; peer < ep_size_ && mismatch.ok(); ++peer) {
      const Participant& other = operation->participants[peer];
      if (!other.arrived) continue;
      mismatch = CheckPair(self.call, other.call);
      peers.push_back(peer);
    }
    if (mismatch.ok()) {
      ++num_copying_;
    } else {
      broken_ = mismatch;
      TakeBrokenEvents(&finished);
    }
  }
  if (!mismatch.ok()) {
    for (Event& event : finished) event.Signal(mismatch);
    return mismatch;
  }

  // Arrived participants do not change until all their exchanges are done, and the operation stays
  // as long as one of them is missing.
  const Participant& self = operation->participants[ep_rank];
  absl::Status copied;
  for (const int32_t peer : peers) {
    const Participant& other = operation->participants[peer];
    if (copied.ok()) copied = CopyBlock(self, other);
    if (copied.ok() && peer != ep_rank) copied = CopyBlock(other, self);
  }

  // Who stood there already has waited for this rank until now.
  const auto now = std::chrono::steady_clock::now();
  absl::Status status;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--num_copying_ == 0) no_copy_.notify_all();
    broken_.Update(copied);
    status = broken_;
    if (!status.ok()) {
      TakeBrokenEvents(&finished);
    } else {
      const auto finish_exchange = [&](Participant& participant) {
        if (--participant.num_missing > 0) return;
        participant.signalled = true;
        finished.push_back(participant.call.done);
        ++operation->num_done;
      };
      for (const int32_t peer : peers) {
        finish_exchange(operation->participants[ep_rank]);
        if (peer != ep_rank) {
          const auto wait = [now](const Participant& waiting) {
            return std::chrono::nanoseconds(now - waiting.arrived_at).count();
          };
          traffic_[peer]->CountWait(ep_rank, wait(operation->participants[peer]));
          traffic_[ep_rank]->CountWait(peer, wait(operation->participants[ep_rank]));
        }
        if (peer != ep_rank) finish_exchange(operation->participants[peer]);
      }
      if (operation->num_done == ep_size_) operations_.erase(place);
    }
  }
  for (Event& event : finished) event.Signal(status);
  return copied;
}

void InProcessExchange::TakeBrokenEvents(std::vector<Event>* events) {
  if (num_copying_ > 0) return;  // the last copier does it
  for (auto& [place, operation] : operations_) {
    for (Participant& participant : operation.participants) {
      if (!participant.arrived || participant.signalled) continue;
      participant.signalled = true;
      events->push_back(participant.call.done);
    }
  }
}

void InProcessExchange::Break(const absl::Status& status) {
  std::vector<Event> finished;
  absl::Status broken;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (broken_.ok()) broken_ = status;
    broken = broken_;
    TakeBrokenEvents(&finished);
  }
  for (Event& event : finished) event.Signal(broken);
}

void InProcessExchange::WaitForCopies() {
  std::unique_lock<std::mutex> lock(mutex_);
  no_copy_.wait(lock, [this] { return num_copying_ == 0; });
}

}  // namespace expertmesh
