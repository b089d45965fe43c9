#include "server/comm/in_process_exchange.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

const char* KindName(InProcessExchange::Kind kind) {
  switch (kind) {
    case InProcessExchange::Kind::kAllToAllV:
      return "AllToAllV";
    case InProcessExchange::Kind::kAllGatherV:
      return "AllGatherV";
    case InProcessExchange::Kind::kBarrier:
      return "Barrier";
  }
  return "invalid";
}

std::string Describe(const InProcessExchange::Call& call) {
  return absl::StrCat(KindName(call.kind), " of incarnation ", call.tag.incarnation, " epoch ",
                      call.tag.epoch, " step ", call.tag.step, " operation ", call.tag.operation);
}

std::vector<int64_t> PrefixSums(absl::Span<const int64_t> counts) {
  std::vector<int64_t> offsets(counts.size());
  for (size_t i = 1; i < counts.size(); ++i) offsets[i] = offsets[i - 1] + counts[i - 1];
  return offsets;
}

}  // namespace

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

int64_t InProcessExchange::SendBytes(const Participant& from, int32_t from_rank,
                                     int32_t to_rank) const {
  switch (from.call.kind) {
    case Kind::kAllToAllV:
      return from.call.send_bytes[to_rank];
    case Kind::kAllGatherV:
      return from.call.receive_bytes[from_rank];
    case Kind::kBarrier:
      break;
  }
  return 0;
}

int64_t InProcessExchange::ReceiveBytes(const Participant& to, int32_t from_rank) const {
  return to.call.kind == Kind::kBarrier ? 0 : to.call.receive_bytes[from_rank];
}

absl::Status InProcessExchange::CheckPair(const Participant& a, int32_t a_rank,
                                          const Participant& b, int32_t b_rank) const {
  if (a.call.kind != b.call.kind || !(a.call.tag == b.call.tag)) {
    return absl::DataLossError(absl::StrCat("rank ", a_rank, " is at ", Describe(a.call), ", rank ",
                                            b_rank, " at ", Describe(b.call)));
  }
  const auto check_way = [&](const Participant& from, int32_t from_rank, const Participant& to,
                             int32_t to_rank) {
    const int64_t sent = SendBytes(from, from_rank, to_rank);
    const int64_t expected = ReceiveBytes(to, from_rank);
    if (sent == expected) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("rank ", from_rank, " sends ", sent, " bytes to rank ",
                                            to_rank, ", which expects ", expected, ", in ",
                                            Describe(from.call)));
  };
  absl::Status status = check_way(a, a_rank, b, b_rank);
  status.Update(check_way(b, b_rank, a, a_rank));
  return status;
}

absl::Status InProcessExchange::CopyBlock(const Participant& from, int32_t from_rank,
                                          const Participant& to, int32_t to_rank) const {
  const int64_t size_bytes = SendBytes(from, from_rank, to_rank);
  if (size_bytes == 0) return absl::OkStatus();
  const int64_t send_offset = from.call.kind == Kind::kAllToAllV ? from.send_offsets[to_rank] : 0;
  std::byte* const receive = to.call.receive + to.recv_offsets[from_rank];
  if (copy_bytes_) return copy_bytes_(receive, from.call.send + send_offset, size_bytes);
  std::memcpy(receive, from.call.send + send_offset, static_cast<size_t>(size_bytes));
  return absl::OkStatus();
}

absl::Status InProcessExchange::Arrive(int32_t ep_rank, OperationPlace place, const Call& call) {
  std::vector<int64_t> send_offsets = PrefixSums(call.send_bytes);
  std::vector<int64_t> recv_offsets = PrefixSums(call.receive_bytes);
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
    self.recv_offsets = std::move(recv_offsets);
    for (int32_t peer = 0; peer < ep_size_ && mismatch.ok(); ++peer) {
      const Participant& other = operation->participants[peer];
      if (!other.arrived) continue;
      mismatch = CheckPair(self, ep_rank, other, peer);
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
    if (copied.ok()) copied = CopyBlock(self, ep_rank, other, peer);
    if (copied.ok() && peer != ep_rank) copied = CopyBlock(other, peer, self, ep_rank);
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
