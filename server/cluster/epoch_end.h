#ifndef EXPERTMESH_SERVER_CLUSTER_EPOCH_END_H_
#define EXPERTMESH_SERVER_CLUSTER_EPOCH_END_H_

#include <cstdint>

#include "absl/status/status.h"

namespace expertmesh {

enum class EpochEndKind : uint8_t {
  kLoss,               // of a member or a step, or the epoch could not be formed
  kRankLeft,           // a member was told to stop and took its leave
  kControlPlaneStops,  // which is the end of every membership
};

// Why an epoch, or a membership, has ended.
struct EpochEnd {
  EpochEndKind kind = EpochEndKind::kLoss;
  absl::Status reason;

  // Somebody wanted it: nothing went wrong.
  bool is_wanted() const { return kind != EpochEndKind::kLoss; }
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CLUSTER_EPOCH_END_H_
