#include "server/comm/nccl_communicator.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/steady_now.h"
#include "kernels/base/stream.h"
#include "server/comm/nccl_exchange.h"
#include "server/comm/nccl_operation.h"
#include "server/comm/placed_communicator.h"

namespace expertmesh {
namespace {

using Result = NcclFunctions::Result;

constexpr std::chrono::milliseconds kInitPollInterval(1);
constexpr absl::Duration kCancelPollInterval = absl::Milliseconds(10);
// Of what each rank sends each other one to connect them.
constexpr int64_t kFirstBytes = 64;

class NcclCommunicator : public PlacedCommunicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<NcclExchange> exchange)
      : PlacedCommunicator(exchange->ep_rank(), exchange->ep_size(), exchange->traffic()),
        exchange_(std::move(exchange)) {}
  ~NcclCommunicator() override { exchange_->Stop(); }

  void Abort(const absl::Status& reason) override {
    Break(reason);
    exchange_->teardown().WaitUntilTornDown();
  }

  void Break(const absl::Status& reason) override {
    exchange_->teardown().Break(AbortedBy(ep_rank(), reason), reason);
  }

  absl::Status status() const override { return exchange_->teardown().broken(); }
  std::vector<int64_t> wait_nanos() const override { return exchange_->wait_nanos(); }

 private:
  absl::Status Enqueue(OperationPlace place, CollectiveCall call, Stream& stream) override {
    return exchange_->Start(place, std::make_shared<NcclOperation>(std::move(call)), stream);
  }

  void OrderClosed(int64_t order, int64_t num_calls) override {
    exchange_->CloseOrder(order, num_calls);
  }

  void BreakWith(const absl::Status& status) override {
    exchange_->teardown().Break(status, status);
  }

  const std::shared_ptr<NcclExchange> exchange_;
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

absl::Status TookTooLong(int32_t ep_rank) {
  return absl::DeadlineExceededError(
      absl::StrCat("rank ", ep_rank, ": NCCL did not connect the ranks in time"));
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
    if (SteadyNow() >= params.deadline) return TookTooLong(params.ep_rank);
    std::this_thread::sleep_for(kInitPollInterval);
  }
}

// As Stream::Wait, but gives up when it is to.
absl::Status WaitForExchange(const NcclCommunicatorParams& params, const Communicator& communicator,
                             Stream& stream) {
  while (true) {
    const absl::Status status =
        stream.Wait(std::min(params.deadline, SteadyNow() + kCancelPollInterval));
    if (!absl::IsDeadlineExceeded(status)) return status;
    // Broken meanwhile, maybe by a deadline of its own.
    if (absl::Status broken = communicator.status(); !broken.ok()) return broken;
    if (params.cancelled != nullptr && params.cancelled->load()) {
      return absl::CancelledError("the epoch was given up");
    }
    if (SteadyNow() >= params.deadline) return TookTooLong(params.ep_rank);
  }
}

// One exchange of each kind: by sends and receives between each two ranks, by NCCL's own
// all-to-all, by its all-gather. In the order of the calls, before any operation that has a place.
absl::Status ConnectPeers(const NcclCommunicatorParams& params, Communicator& communicator) {
  const absl::StatusOr<Buffer> memory =
      params.allocator->Allocate(2 * params.ep_size * kFirstBytes);
  const std::vector<int64_t> to_all(params.ep_size, kFirstBytes);
  std::vector<int64_t> to_others = to_all;
  to_others[params.ep_rank] = 0;
  const std::unique_ptr<Stream> stream = NewInlineHostStream();
  // Without memory the rank is to say so, rather than be waited for.
  absl::Status status = memory.status();
  CollectiveTag tag;
  tag.incarnation = params.incarnation;
  tag.epoch = params.epoch;
  for (const std::vector<int64_t>& bytes : {to_others, to_all}) {
    if (!status.ok()) break;
    AllToAllVParams exchange;
    exchange.tag = tag;
    exchange.send = memory->data();
    exchange.send_bytes = bytes;
    exchange.receive = memory->data() + params.ep_size * kFirstBytes;
    exchange.receive_bytes = bytes;
    status = communicator.AllToAllV(exchange, *stream);
    ++tag.operation;
  }
  if (status.ok()) {
    AllGatherVParams gather;
    gather.tag = tag;
    gather.send = memory->data();
    gather.receive = memory->data() + params.ep_size * kFirstBytes;
    gather.receive_bytes = to_all;
    status = communicator.AllGatherV(gather, *stream);
  }
  if (status.ok()) status = WaitForExchange(params, communicator, *stream);
  if (status.ok()) return status;
  // Until it has returned the device may write into the memory.
  communicator.Abort(status);
  return absl::Status(status.code(), absl::StrCat("connecting the ranks: ", status.message()));
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
  auto communicator = std::make_unique<NcclCommunicator>(std::move(exchange));
  if (params.ep_size > 1 && params.allocator != nullptr) {
    if (status = ConnectPeers(params, *communicator); !status.ok()) return status;
  }
  return communicator;
}

}  // namespace expertmesh
