#ifndef EXPERTMESH_SERVER_COMM_PLACED_COMMUNICATOR_H_
#define EXPERTMESH_SERVER_COMM_PLACED_COMMUNICATOR_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/stream.h"
#include "server/comm/collective_call.h"
#include "server/comm/comm_traffic.h"
#include "server/comm/communicator.h"
#include "server/comm/operation_places.h"

namespace expertmesh {

// What every communicator does with a call before it is its own: checks the counts, counts what is
// sent, and gives the call its place among all of the epoch.
class PlacedCommunicator : public Communicator {
 public:
  int32_t ep_rank() const final { return ep_rank_; }
  int32_t ep_size() const final { return ep_size_; }
  absl::Status AllToAllV(const AllToAllVParams& params, Stream& stream) final;
  absl::Status AllGatherV(const AllGatherVParams& params, Stream& stream) final;
  absl::Status Barrier(const CollectiveTag& tag, Stream& stream) final;
  void CloseOrder(int64_t order) final;
  std::vector<int64_t> bytes_sent() const final { return traffic_.bytes_sent(); }
  std::vector<int64_t> wait_nanos() const override { return traffic_.wait_nanos(); }

 protected:
  // `traffic` must live as long as the communicator.
  PlacedCommunicator(int32_t ep_rank, int32_t ep_size, CommTraffic& traffic)
      : ep_rank_(ep_rank), ep_size_(ep_size), traffic_(traffic) {}

  // What all ranks are told of an Abort or Break of this one.
  static absl::Status AbortedBy(int32_t ep_rank, const absl::Status& reason);

 private:
  // Leaves `call` on `stream`; work that follows there waits for it.
  virtual absl::Status Enqueue(OperationPlace place, CollectiveCall call, Stream& stream) = 0;
  // The order had that many calls.
  virtual void OrderClosed(int64_t order, int64_t num_calls) = 0;
  // Breaks the communicator on all ranks, with this very status.
  virtual void BreakWith(const absl::Status& status) = 0;

  CollectiveCall NewCall(CollectiveCall::Kind kind, const CollectiveTag& tag, const std::byte* send,
                         std::byte* receive) const;
  absl::Status Refuse(const absl::Status& status);
  absl::Status Place(CollectiveCall call, Stream& stream);

  const int32_t ep_rank_;
  const int32_t ep_size_;
  CommTraffic& traffic_;
  std::mutex mutex_;  // guards what follows
  OperationPlaces places_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_PLACED_COMMUNICATOR_H_
