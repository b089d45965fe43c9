#include "server/comm/tcp_communicator.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/comm/placed_communicator.h"
#include "server/comm/tcp_exchange.h"
#include "server/comm/tcp_operation.h"

namespace expertmesh {
namespace {

class TcpCommunicator : public PlacedCommunicator {
 public:
  explicit TcpCommunicator(std::shared_ptr<TcpExchange> exchange)
      : PlacedCommunicator(exchange->ep_rank(), exchange->ep_size(), exchange->traffic()),
        exchange_(std::move(exchange)) {}

  ~TcpCommunicator() override {
    exchange_->Break(absl::UnavailableError(absl::StrCat("rank ", ep_rank(), " has left")));
    exchange_->Stop();
  }

  void Abort(const absl::Status& reason) override { BreakWith(AbortedBy(ep_rank(), reason)); }

  absl::Status status() const override { return exchange_->broken(); }

 private:
  absl::Status Enqueue(OperationPlace place, CollectiveCall call, Stream& stream) override {
    const Event done = call.done;
    absl::Status status = stream.Enqueue(
        [exchange = exchange_, place, operation = std::make_shared<TcpOperation>(std::move(call))] {
          return exchange->Start(place, operation);
        });
    status.Update(stream.WaitFor(done));
    return status;
  }

  void OrderClosed(int64_t order, int64_t num_calls) override {
    exchange_->CloseOrder(order, num_calls);
  }

  void BreakWith(const absl::Status& status) override { exchange_->Break(status); }

  const std::shared_ptr<TcpExchange> exchange_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> NewTcpCommunicator(
    const TcpCommunicatorParams& params) {
  absl::StatusOr<std::vector<TcpPeerSockets>> peers = ConnectTcpMesh(params.mesh);
  if (!peers.ok()) return peers.status();
  auto exchange = std::make_shared<TcpExchange>(params.mesh.ep_rank, *std::move(peers),
                                                params.operation_timeout);
  if (absl::Status status = exchange->broken(); !status.ok()) return status;
  return std::make_unique<TcpCommunicator>(std::move(exchange));
}

}  // namespace expertmesh
