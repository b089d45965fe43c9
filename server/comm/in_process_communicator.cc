#include "server/comm/in_process_communicator.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/comm/in_process_exchange.h"
#include "server/comm/placed_communicator.h"

namespace expertmesh {
namespace {

class InProcessCommunicator : public PlacedCommunicator {
 public:
  InProcessCommunicator(std::shared_ptr<InProcessExchange> exchange, int32_t ep_rank)
      : PlacedCommunicator(ep_rank, exchange->ep_size(), exchange->traffic(ep_rank)),
        exchange_(std::move(exchange)) {}

  ~InProcessCommunicator() override {
    exchange_->Break(absl::UnavailableError(absl::StrCat("rank ", ep_rank(), " has left")));
    exchange_->WaitForCopies();
  }

  void Abort(const absl::Status& reason) override {
    Break(reason);
    exchange_->WaitForCopies();
  }

  void Break(const absl::Status& reason) override { BreakWith(AbortedBy(ep_rank(), reason)); }

  absl::Status status() const override { return exchange_->broken(); }

 private:
  absl::Status Enqueue(OperationPlace place, CollectiveCall call, Stream& stream) override {
    const Event done = call.done;
    absl::Status status = stream.Enqueue([exchange = exchange_, place, call = std::move(call)] {
      return exchange->Arrive(place, call);
    });
    // A stream that has failed drops its work, and whoever would wait for it and abort may be
    // waiting for a peer's stream first, which waits for this rank.
    Event arrived;
    arrived.OnDone([exchange = exchange_, ep_rank = ep_rank(), arrived] {
      const absl::Status failed = arrived.status();
      if (!failed.ok()) exchange->Break(AbortedBy(ep_rank, failed));
    });
    const absl::Status recorded = stream.Record(arrived);
    // It holds itself until it is done.
    if (!recorded.ok()) arrived.Signal(recorded);
    status.Update(recorded);
    status.Update(stream.WaitFor(done));
    return status;
  }

  // Ranks meet at each operation by itself: nobody waits for those before it.
  void OrderClosed(int64_t, int64_t) override {}

  void BreakWith(const absl::Status& status) override { exchange_->Break(status); }

  const std::shared_ptr<InProcessExchange> exchange_;
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
