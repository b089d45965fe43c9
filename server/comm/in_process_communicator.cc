#include "server/comm/in_process_communicator.h"

#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/comm/check_counts.h"
#include "server/comm/in_process_exchange.h"
#include "server/comm/operation_places.h"
#include "server/ops/rank_text.h"

namespace expertmesh {
namespace {

absl::Status AbortedBy(int32_t ep_rank, const absl::Status& reason) {
  return absl::AbortedError(RankText(ep_rank, "aborted the communicator", reason));
}

class InProcessCommunicator : public Communicator {
 public:
  InProcessCommunicator(std::shared_ptr<InProcessExchange> exchange, int32_t ep_rank)
      : exchange_(std::move(exchange)), ep_rank_(ep_rank) {}

  ~InProcessCommunicator() override {
    exchange_->Break(absl::UnavailableError(absl::StrCat("rank ", ep_rank_, " has left")));
    exchange_->WaitForCopies();
  }

  int32_t ep_rank() const override { return ep_rank_; }
  int32_t ep_size() const override { return exchange_->ep_size(); }

  absl::Status AllToAllV(const AllToAllVParams& params, Stream& stream) override {
    InProcessExchange::Call call;
    call.kind = InProcessExchange::Kind::kAllToAllV;
    call.tag = params.tag;
    call.send = params.send;
    call.receive = params.receive;
    call.send_bytes = params.send_bytes;
    call.receive_bytes = params.receive_bytes;
    absl::Status status = CheckCounts("send_bytes", params.send_bytes, ep_size());
    status.Update(CheckCounts("receive_bytes", params.receive_bytes, ep_size()));
    if (!status.ok()) return Refuse(status);
    for (int32_t peer = 0; peer < ep_size(); ++peer) {
      if (peer != ep_rank_) exchange_->traffic(ep_rank_).CountSent(peer, params.send_bytes[peer]);
    }
    return Post(call, stream);
  }

  absl::Status AllGatherV(const AllGatherVParams& params, Stream& stream) override {
    InProcessExchange::Call call;
    call.kind = InProcessExchange::Kind::kAllGatherV;
    call.tag = params.tag;
    call.send = params.send;
    call.receive = params.receive;
    call.receive_bytes = params.receive_bytes;
    if (absl::Status status = CheckCounts("receive_bytes", params.receive_bytes, ep_size());
        !status.ok()) {
      return Refuse(status);
    }
    for (int32_t peer = 0; peer < ep_size(); ++peer) {
      if (peer != ep_rank_)
        exchange_->traffic(ep_rank_).CountSent(peer, params.receive_bytes[ep_rank_]);
    }
    return Post(call, stream);
  }

  absl::Status Barrier(const CollectiveTag& tag, Stream& stream) override {
    InProcessExchange::Call call;
    call.tag = tag;
    return Post(call, stream);
  }

  // Ranks meet at each operation by itself: nobody waits for those before it.
  void CloseOrder(int64_t order) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    places_.Close(order);
  }

  void Abort(const absl::Status& reason) override {
    Break(reason);
    exchange_->WaitForCopies();
  }

  void Break(const absl::Status& reason) override { exchange_->Break(AbortedBy(ep_rank_, reason)); }

  absl::Status status() const override { return exchange_->broken(); }

  std::vector<int64_t> bytes_sent() const override {
    return exchange_->traffic(ep_rank_).bytes_sent();
  }
  std::vector<int64_t> wait_nanos() const override {
    return exchange_->traffic(ep_rank_).wait_nanos();
  }

 private:
  // The peers wait for this rank's part, which will never come.
  absl::Status Refuse(const absl::Status& status) {
    exchange_->Break(
        absl::DataLossError(RankText(ep_rank_, "posted an invalid operation", status.message())));
    return status;
  }

  absl::Status Post(const InProcessExchange::Call& call, Stream& stream) {
    if (absl::Status status = exchange_->broken(); !status.ok()) return status;
    OperationPlace place;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      place = places_.Next(call.tag);
    }
    absl::Status status = stream.Enqueue([exchange = exchange_, ep_rank = ep_rank_, place, call] {
      return exchange->Arrive(ep_rank, place, call);
    });
    // A stream that has failed drops its work, and whoever would wait for it and abort may be
    // waiting for a peer's stream first, which waits for this rank.
    Event arrived;
    arrived.OnDone([exchange = exchange_, ep_rank = ep_rank_, arrived] {
      const absl::Status failed = arrived.status();
      if (!failed.ok()) exchange->Break(AbortedBy(ep_rank, failed));
    });
    const absl::Status recorded = stream.Record(arrived);
    // It holds itself until it is done.
    if (!recorded.ok()) arrived.Signal(recorded);
    status.Update(recorded);
    status.Update(stream.WaitFor(call.done));
    return status;
  }

  const std::shared_ptr<InProcessExchange> exchange_;
  const int32_t ep_rank_;
  std::mutex mutex_;  // guards what follows
  OperationPlaces places_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> NewInProcessCommunicators(
    int32_t ep_size,
    std::function<absl::Status(std::byte* to, const std::byte* from, int64_t size_bytes)>
        copy_bytes) {
  auto exchange = std::make_shared<InProcessExchange>(ep_size, std::move(copy_bytes));
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    communicators.push_back(std::make_unique<InProcessCommunicator>(exchange, rank));
  }
  return communicators;
}

}  // namespace expertmesh
