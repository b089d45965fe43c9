#ifndef EXPERTMESH_SERVER_COMM_OPERATION_ORDER_H_
#define EXPERTMESH_SERVER_COMM_OPERATION_ORDER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/stream.h"
#include "server/comm/operation_places.h"

namespace expertmesh {

// A rank's operations from when they are called until their turn: called in whatever order, taken
// by place. An Operation has ToString and an Event `done`. Not thread safe.
template <typename Operation>
class OperationOrder {
 public:
  // DATA_LOSS, and it is not added, when the turn of its place is past: another step has had it,
  // and no peer will come.
  absl::Status Add(OperationPlace place, std::shared_ptr<Operation> operation, int32_t ep_rank) {
    if (place < next_) {
      return absl::DataLossError(absl::StrCat("rank ", ep_rank, " calls ", operation->ToString(),
                                              " at place ", place.order, ", which is past"));
    }
    waiting_.emplace(place, std::move(operation));
    return absl::OkStatus();
  }

  // The order has `num_operations` and no more: after them the next order's turn comes.
  void Close(int64_t order, int64_t num_operations) {
    if (order < next_.order) return;
    closed_.emplace(order, num_operations);
    PassClosed();
  }

  // The one whose turn it is; null until it has been called.
  const Operation* Next() const {
    const auto next = waiting_.find(next_);
    return next == waiting_.end() ? nullptr : next->second.get();
  }
  std::shared_ptr<Operation> TakeNext() {
    const auto next = waiting_.find(next_);
    if (next == waiting_.end()) return nullptr;
    std::shared_ptr<Operation> operation = std::move(next->second);
    waiting_.erase(next);
    ++next_.index;
    PassClosed();
    return operation;
  }

  // Of those that wait, by place.
  std::vector<Event> DoneEvents() const {
    std::vector<Event> events;
    for (const auto& [place, operation] : waiting_) events.push_back(operation->done);
    return events;
  }
  bool empty() const { return waiting_.empty(); }
  void clear() { waiting_.clear(); }

 private:
  void PassClosed() {
    for (auto closed = closed_.find(next_.order);
         closed != closed_.end() && closed->second <= next_.index;
         closed = closed_.find(next_.order)) {
      closed_.erase(closed);
      next_ = {next_.order + 1, 0};
    }
  }

  std::map<OperationPlace, std::shared_ptr<Operation>> waiting_;
  std::map<int64_t, int64_t> closed_;  // how many operations each has, from next_ on
  OperationPlace next_;                // its order is not spent
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_OPERATION_ORDER_H_
