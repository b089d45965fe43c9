#ifndef EXPERTMESH_SERVER_COMM_OPERATION_PLACES_H_
#define EXPERTMESH_SERVER_COMM_OPERATION_PLACES_H_

#include <compare>
#include <cstdint>
#include <map>

#include "server/comm/communicator.h"

namespace expertmesh {

// Where an operation stands among all of its epoch: the same number on every rank.
struct OperationPlace {
  int64_t order = 0;
  int64_t index = 0;  // among those of the order
  friend auto operator<=>(const OperationPlace &, const OperationPlace &) = default;
};

// Gives a rank's calls their places. Not thread safe.
class OperationPlaces {
 public:
  // Without places of their own all calls stand in order 0, which stays open.
  OperationPlace Next(const CollectiveTag &tag) {
    const int64_t order = tag.order == CollectiveTag::kAsCalled ? 0 : tag.order;
    return {order, num_called_[order]++};
  }
  // How many operations the order has had; it is forgotten.
  int64_t Close(int64_t order) {
    const auto found = num_called_.find(order);
    if (found == num_called_.end()) return 0;
    const int64_t num_called = found->second;
    num_called_.erase(found);
    return num_called;
  }

 private:
  std::map<int64_t, int64_t> num_called_;  // of open orders
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_OPERATION_PLACES_H_
