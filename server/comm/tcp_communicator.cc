#include "server/comm/tcp_communicator.h"

#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/comm/check_counts.h"
#include "server/comm/operation_places.h"
#include "server/comm/tcp_exchange.h"
#include "server/comm/tcp_operation.h"
#include "server/ops/rank_text.h"

namespace expertmesh {
namespace {

class TcpCommunicator : public Communicator {
 public:
  explicit TcpCommunicator(std::shared_ptr<TcpExchange> exchange)
      : exchange_(std::move(exchange)) {}

  ~TcpCommunicator() override {
    exchange_->Break(absl::UnavailableError(absl::StrCat("rank ", ep_rank(), " has left")));
    exchange_->Stop();
  }

  int32_t ep_rank() const override { return exchange_->ep_rank(); }
  int32_t ep_size() const override { return exchange_->ep_size(); }

  absl::Status AllToAllV(const AllToAllVParams& params, Stream& stream) override {
    absl::Status status = CheckCounts("send_bytes", params.send_bytes, ep_size());
    status.Update(CheckCounts("receive_bytes", params.receive_bytes, ep_size()));
    if (!status.ok()) return Refuse(status);
    auto operation = NewOperation();
    operation->kind = TcpOperation::Kind::kAllToAllV;
    operation->tag = params.tag;
    operation->send = params.send;
    operation->receive = params.receive;
    operation->send_bytes.assign(params.send_bytes.begin(), params.send_bytes.end());
    operation->receive_bytes.assign(params.receive_bytes.begin(), params.receive_bytes.end());
    for (int32_t peer = 0; peer < ep_size(); ++peer) {
      if (peer != ep_rank()) exchange_->traffic().CountSent(peer, params.send_bytes[peer]);
    }
    return Post(std::move(operation), stream);
  }

  absl::Status AllGatherV(const AllGatherVParams& params, Stream& stream) override {
    if (absl::Status status = CheckCounts("receive_bytes", params.receive_bytes, ep_size());
        !status.ok()) {
      return Refuse(status);
    }
    auto operation = NewOperation();
    operation->kind = TcpOperation::Kind::kAllGatherV;
    operation->tag = params.tag;
    operation->send = params.send;
    operation->receive = params.receive;
    operation->receive_bytes.assign(params.receive_bytes.begin(), params.receive_bytes.end());
    for (int32_t peer = 0; peer < ep_size(); ++peer) {
      if (peer != ep_rank()) exchange_->traffic().CountSent(peer, params.receive_bytes[ep_rank()]);
    }
    return Post(std::move(operation), stream);
  }

  absl::Status Barrier(const CollectiveTag& tag, Stream& stream) override {
    auto operation = NewOperation();
    operation->tag = tag;
    return Post(std::move(operation), stream);
  }

  void CloseOrder(int64_t order) override {
    int64_t num_operations;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      num_operations = places_.Close(order);
    }
    exchange_->CloseOrder(order, num_operations);
  }

  void Abort(const absl::Status& reason) override {
    exchange_->Break(absl::AbortedError(RankText(ep_rank(), "aborted the communicator", reason)));
  }

  absl::Status status() const override { return exchange_->broken(); }

  std::vector<int64_t> bytes_sent() const override { return exchange_->traffic().bytes_sent(); }
  std::vector<int64_t> wait_nanos() const override { return exchange_->traffic().wait_nanos(); }

 private:
  std::shared_ptr<TcpOperation> NewOperation() const {
    auto operation = std::make_shared<TcpOperation>();
    operation->ep_rank = ep_rank();
    operation->ep_size = ep_size();
    return operation;
  }

  // The peers wait for this rank's part, which will never come.
  absl::Status Refuse(const absl::Status& status) {
    exchange_->Break(
        absl::DataLossError(RankText(ep_rank(), "posted an invalid operation", status.message())));
    return status;
  }

  absl::Status Post(std::shared_ptr<TcpOperation> operation, Stream& stream) {
    if (absl::Status status = exchange_->broken(); !status.ok()) return status;
    OperationPlace place;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      place = places_.Next(operation->tag);
    }
    const Event done = operation->done;
    absl::Status status =
        stream.Enqueue([exchange = exchange_, place, operation = std::move(operation)] {
          return exchange->Start(place, operation);
        });
    status.Update(stream.WaitFor(done));
    return status;
  }

  const std::shared_ptr<TcpExchange> exchange_;
  std::mutex mutex_;  // guards what follows
  OperationPlaces places_;
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
