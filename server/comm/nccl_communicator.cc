#include "server/comm/nccl_communicator.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/steady_now.h"
#include "server/comm/check_counts.h"
#include "server/comm/nccl_exchange.h"
#include "server/comm/nccl_operation.h"
#include "server/comm/operation_places.h"
#include "server/ops/rank_text.h"

namespace expertmesh {
namespace {

using Result = NcclFunctions::Result;

constexpr std::chrono::milliseconds kInitPollInterval(1);

class NcclCommunicator : public Communicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<NcclExchange> exchange)
      : exchange_(std::move(exchange)) {}
  ~NcclCommunicator() override { exchange_->Stop(); }

  int32_t ep_rank() const override { return exchange_->ep_rank(); }
  int32_t ep_size() const override { return exchange_->ep_size(); }

  absl::Status AllToAllV(const AllToAllVParams& params, Stream& stream) override {
    auto operation = std::make_shared<NcclOperation>();
    operation->kind = NcclOperation::Kind::kAllToAllV;
    operation->tag = params.tag;
    operation->send = params.send;
    operation->receive = params.receive;
    absl::Status status = CheckCounts("send_bytes", params.send_bytes, ep_size());
    status.Update(CheckCounts("receive_bytes", params.receive_bytes, ep_size()));
    if (!status.ok()) return Refuse(status);
    operation->send_bytes.assign(params.send_bytes.begin(), params.send_bytes.end());
    operation->receive_bytes.assign(params.receive_bytes.begin(), params.receive_bytes.end());
    return Post(std::move(operation), stream);
  }

  absl::Status AllGatherV(const AllGatherVParams& params, Stream& stream) override {
    auto operation = std::make_shared<NcclOperation>();
    operation->kind = NcclOperation::Kind::kAllGatherV;
    operation->tag = params.tag;
    operation->send = params.send;
    operation->receive = params.receive;
    if (absl::Status status = CheckCounts("receive_bytes", params.receive_bytes, ep_size());
        !status.ok()) {
      return Refuse(status);
    }
    operation->send_bytes.assign(ep_size(), params.receive_bytes[ep_rank()]);
    operation->receive_bytes.assign(params.receive_bytes.begin(), params.receive_bytes.end());
    return Post(std::move(operation), stream);
  }

  absl::Status Barrier(const CollectiveTag& tag, Stream& stream) override {
    auto operation = std::make_shared<NcclOperation>();
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
    Break(reason);
    exchange_->teardown().WaitUntilTornDown();
  }

  void Break(const absl::Status& reason) override {
    exchange_->teardown().Break(
        absl::AbortedError(RankText(ep_rank(), "aborted the communicator", reason)), reason);
  }

  absl::Status status() const override { return exchange_->teardown().broken(); }
  std::vector<int64_t> bytes_sent() const override { return exchange_->traffic().bytes_sent(); }
  std::vector<int64_t> wait_nanos() const override { return exchange_->wait_nanos(); }

 private:
  // The peers wait for this rank's part, which will never come.
  absl::Status Refuse(const absl::Status& status) {
    const absl::Status broken =
        absl::DataLossError(RankText(ep_rank(), "posted an invalid operation", status.message()));
    exchange_->teardown().Break(broken, broken);
    return status;
  }

  absl::Status Post(std::shared_ptr<NcclOperation> operation, Stream& stream) {
    if (absl::Status status = exchange_->teardown().broken(); !status.ok()) return status;
    for (int32_t peer = 0; peer < ep_size() && !operation->send_bytes.empty(); ++peer) {
      if (peer != ep_rank()) exchange_->traffic().CountSent(peer, operation->send_bytes[peer]);
    }
    OperationPlace place;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      place = places_.Next(operation->tag);
    }
    return exchange_->Start(place, std::move(operation), stream);
  }

  const std::shared_ptr<NcclExchange> exchange_;
  std::mutex mutex_;  // guards what follows
  OperationPlaces places_;
};

absl::Status CheckParams(const NcclCommunicatorParams& params) {
  if (params.ep_size < 1 || params.ep_rank < 0 || params.ep_rank >= params.ep_size) {
    return absl::InvalidArgumentError(absl::StrCat("ep_rank is ", params.ep_rank, ", ep_size ",
                                                   params.ep_size, "; 0 <= ep_rank < ep_size"));
  }
  if (params.functions == nullptr || params.control == nullptr || params.store == nullptr ||
      params.on_stuck_abort == nullptr) {
    return absl::InvalidArgumentError("functions, control, store and on_stuck_abort must be given");
  }
  if (params.control->ep_rank() != params.ep_rank || params.control->ep_size() != params.ep_size) {
    return absl::InvalidArgumentError("control is of another rank or group");
  }
  return absl::OkStatus();
}

// Rank 0 makes the id of the epoch, the others find it in the store. As text: a store may hold
// nothing else.
absl::StatusOr<NcclFunctions::UniqueId> ShareUniqueId(const NcclCommunicatorParams& params) {
  const std::string key = RendezvousKey(params.incarnation, params.epoch, "nccl/unique_id");
  NcclFunctions::UniqueId id = {};
  if (params.ep_rank == 0) {
    absl::Status status = NcclStatus(*params.functions, params.functions->GetUniqueId(&id), nullptr,
                                     "ncclGetUniqueId");
    if (status.ok() && params.ep_size > 1) {
      status = params.store->Set(key, absl::BytesToHexString({id.data(), id.size()}));
    }
    if (!status.ok()) return status;
    return id;
  }
  const absl::StatusOr<std::string> text = params.store->Get(key, params.deadline);
  if (!text.ok()) return text.status();
  const std::string bytes = absl::HexStringToBytes(*text);
  if (text->size() != 2 * id.size() || bytes.size() != id.size()) {
    return absl::DataLossError(absl::StrCat("rendezvous key ", key, " holds no NCCL id"));
  }
  std::copy(bytes.begin(), bytes.end(), id.begin());
  return id;
}

// Until all ranks have come.
absl::Status WaitForInit(const NcclCommunicatorParams& params, NcclFunctions::Comm comm) {
  while (true) {
    Result state = Result::kSuccess;
    absl::Status status =
        NcclStatus(*params.functions, params.functions->CommGetAsyncError(comm, &state), comm,
                   "ncclCommGetAsyncError");
    status.Update(NcclStatus(*params.functions, state, comm, "ncclCommInitRankConfig"));
    if (!status.ok() || state == Result::kSuccess) return status;
    if (params.cancelled != nullptr && params.cancelled->load()) {
      return absl::CancelledError("the epoch was given up");
    }
    if (status = params.control->status(); !status.ok()) return status;
    if (SteadyNow() >= params.deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", params.ep_rank, ": NCCL did not connect the ranks in time"));
    }
    std::this_thread::sleep_for(kInitPollInterval);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> NewNcclCommunicator(NcclCommunicatorParams params) {
  absl::Status status = CheckParams(params);
  if (status.ok()) status = params.functions->SetDevice(params.device_index);
  if (!status.ok()) return status;
  const absl::StatusOr<NcclFunctions::UniqueId> id = ShareUniqueId(params);
  if (!id.ok()) return id.status();

  NcclExchange::Params exchange_params;
  NcclFunctions& functions = *params.functions;
  status = functions.StreamCreate(&exchange_params.stream);
  if (!status.ok()) return status;
  NcclFunctions::Comm comm = nullptr;
  status = NcclStatus(functions, functions.CommInitRank(&comm, params.ep_size, *id, params.ep_rank),
                      comm, "ncclCommInitRankConfig");
  if (status.ok()) status = WaitForInit(params, comm);
  if (!status.ok() && comm == nullptr) {
    functions.StreamDestroy(exchange_params.stream);
    return status;
  }

  exchange_params.ep_rank = params.ep_rank;
  exchange_params.ep_size = params.ep_size;
  exchange_params.device_index = params.device_index;
  exchange_params.functions = std::move(params.functions);
  exchange_params.comm = comm;
  exchange_params.control = std::move(params.control);
  exchange_params.operation_timeout = params.operation_timeout;
  exchange_params.abort_timeout = params.abort_timeout;
  exchange_params.on_stuck_abort = std::move(params.on_stuck_abort);
  auto exchange = std::make_shared<NcclExchange>(std::move(exchange_params));
  if (!status.ok()) exchange->teardown().Break(status, status);
  status.Update(exchange->Begin());
  if (!status.ok()) {
    exchange->Stop();
    return status;
  }
  return std::make_unique<NcclCommunicator>(std::move(exchange));
}

}  // namespace expertmesh
