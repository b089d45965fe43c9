#include "server/comm/placed_communicator.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/ops/rank_text.h"

namespace expertmesh {
namespace {

// INVALID_ARGUMENT unless `counts`, called `name`, are one for each rank and none is negative.
absl::Status CheckCounts(const char* name, absl::Span<const int64_t> counts, int32_t ep_size) {
  if (static_cast<int64_t>(counts.size()) != ep_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", counts.size(), " entries for ", ep_size, " ranks"));
  }
  for (const int64_t count : counts) {
    if (count < 0) return absl::InvalidArgumentError(absl::StrCat(name, ": ", count, " < 0"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PlacedCommunicator::AllToAllV(const AllToAllVParams& params, Stream& stream) {
  absl::Status status = CheckCounts("send_bytes", params.send_bytes, ep_size_);
  status.Update(CheckCounts("receive_bytes", params.receive_bytes, ep_size_));
  if (!status.ok()) return Refuse(status);
  CollectiveCall call =
      NewCall(CollectiveCall::Kind::kAllToAllV, params.tag, params.send, params.receive);
  call.send_bytes.assign(params.send_bytes.begin(), params.send_bytes.end());
  call.receive_bytes.assign(params.receive_bytes.begin(), params.receive_bytes.end());
  return Place(std::move(call), stream);
}

absl::Status PlacedCommunicator::AllGatherV(const AllGatherVParams& params, Stream& stream) {
  const absl::Status status = CheckCounts("receive_bytes", params.receive_bytes, ep_size_);
  if (!status.ok()) return Refuse(status);
  CollectiveCall call =
      NewCall(CollectiveCall::Kind::kAllGatherV, params.tag, params.send, params.receive);
  call.send_bytes.assign(ep_size_, params.receive_bytes[ep_rank_]);
  call.receive_bytes.assign(params.receive_bytes.begin(), params.receive_bytes.end());
  return Place(std::move(call), stream);
}

absl::Status PlacedCommunicator::Barrier(const CollectiveTag& tag, Stream& stream) {
  CollectiveCall call = NewCall(CollectiveCall::Kind::kBarrier, tag, nullptr, nullptr);
  call.send_bytes.assign(ep_size_, 0);
  call.receive_bytes.assign(ep_size_, 0);
  return Place(std::move(call), stream);
}

CollectiveCall PlacedCommunicator::NewCall(CollectiveCall::Kind kind, const CollectiveTag& tag,
                                           const std::byte* send, std::byte* receive) const {
  CollectiveCall call;
  call.kind = kind;
  call.ep_rank = ep_rank_;
  call.ep_size = ep_size_;
  call.tag = tag;
  call.send = send;
  call.receive = receive;
  return call;
}

absl::Status PlacedCommunicator::Place(CollectiveCall call, Stream& stream) {
  if (absl::Status broken = status(); !broken.ok()) return broken;
  for (int32_t peer = 0; peer < ep_size_; ++peer) {
    if (peer != ep_rank_) traffic_.CountSent(peer, call.send_bytes[peer]);
  }
  OperationPlace place;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    place = places_.Next(call.tag);
  }
  return Enqueue(place, std::move(call), stream);
}

// The peers wait for this rank's part, which will never come.
absl::Status PlacedCommunicator::Refuse(const absl::Status& status) {
  BreakWith(
      absl::DataLossError(RankText(ep_rank_, "posted an invalid operation", status.message())));
  return status;
}

void PlacedCommunicator::CloseOrder(int64_t order) {
  int64_t num_calls;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_calls = places_.Close(order);
  }
  OrderClosed(order, num_calls);
}

absl::Status PlacedCommunicator::AbortedBy(int32_t ep_rank, const absl::Status& reason) {
  return absl::AbortedError(RankText(ep_rank, "aborted the communicator", reason));
}

}  // namespace expertmesh
