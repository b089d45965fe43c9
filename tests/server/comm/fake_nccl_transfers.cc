#include "tests/server/comm/fake_nccl_transfers.h"

#include <cstring>

namespace expertmesh {

FakeNcclTransfers::Waiting& FakeNcclTransfers::WaitingWith(const std::string& group, int32_t rank,
                                                           const Part& part) {
  const auto ranks = part.is_send ? std::pair{rank, part.peer} : std::pair{part.peer, rank};
  return channels_[{group, ranks}];
}

void FakeNcclTransfers::Post(const std::string& group, int32_t rank, std::vector<Part>& parts) {
  for (Part& part : parts) {
    Waiting& waiting = WaitingWith(group, rank, part);
    (part.is_send ? waiting.sends : waiting.receives).push_back(&part);
    Match(waiting);
  }
}

void FakeNcclTransfers::Match(Waiting& waiting) {
  while (!waiting.sends.empty() && !waiting.receives.empty()) {
    Part& send = *waiting.sends.front();
    Part& receive = *waiting.receives.front();
    if (send.num_bytes != receive.num_bytes || send.kind != receive.kind) return;
    std::memcpy(receive.to, send.from, static_cast<size_t>(send.num_bytes));
    send.over = receive.over = true;
    waiting.sends.pop_front();
    waiting.receives.pop_front();
  }
}

void FakeNcclTransfers::Withdraw(const std::string& group, int32_t rank, std::vector<Part>& parts) {
  for (Part& part : parts) {
    Waiting& waiting = WaitingWith(group, rank, part);
    std::erase(waiting.sends, &part);
    std::erase(waiting.receives, &part);
  }
}

}  // namespace expertmesh
