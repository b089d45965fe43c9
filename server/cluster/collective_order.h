#ifndef EXPERTMESH_SERVER_CLUSTER_COLLECTIVE_ORDER_H_
#define EXPERTMESH_SERVER_CLUSTER_COLLECTIVE_ORDER_H_

#include <cstdint>
#include <optional>
#include <utility>

namespace expertmesh {

// Gives the collectives of all lanes their places in the one total order of their epoch: 0, 1, 2
// and so on, two for each step, whose slices carry them to every rank. Steps 1, 2, 3 of which the
// first two were promised a follower, with D for what goes before the experts and C for what comes
// home:
//
//   place  0   1   2   3   4   5
//         D1  D2  C1  D3  C2  C3
//
// So the rows of step n + 1 travel while the experts of step n compute, and its results while those
// of n + 1 do; but nobody waits for a step that may never come: a place is held for the follower
// only if it was promised, and then it comes or is skipped. That, and that a step's D is before its
// C, is all that ranks rely on (RankEngine). Not thread safe: for whoever starts the steps.
class CollectiveOrder {
 public:
  struct Places {
    int64_t dispatch = 0;
    int64_t combine = 0;
  };

  Places StartStep(uint64_t epoch, bool has_follower) {
    if (epoch != epoch_) {
      epoch_ = epoch;
      next_ = 0;
      follower_.reset();
    }
    Places places;
    places.dispatch = follower_.has_value() ? *std::exchange(follower_, std::nullopt) : next_++;
    if (has_follower) follower_ = next_++;
    places.combine = next_++;
    return places;
  }

  // The place of the promised step, which does not come; null when there was no promise.
  std::optional<int64_t> SkipFollower() { return std::exchange(follower_, std::nullopt); }

  // Of the last step.
  uint64_t epoch() const { return epoch_; }

 private:
  uint64_t epoch_ = 0;
  int64_t next_ = 0;
  std::optional<int64_t> follower_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_COLLECTIVE_ORDER_H_
