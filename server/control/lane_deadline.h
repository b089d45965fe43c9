#ifndef EXPERTMESH_SERVER_CONTROL_LANE_DEADLINE_H_
#define EXPERTMESH_SERVER_CONTROL_LANE_DEADLINE_H_

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"

namespace expertmesh {

// By when a step must be done that starts at `begun` behind `num_ahead` steps in flight, the last
// of which has `last_deadline`. Time spent behind those is not its own; but each of them takes a
// step_timeout at most, however long steps have followed each other without a pause, so that a rank
// that stands still is noticed within (num_ahead + 1) * step_timeout.
inline absl::Time LaneDeadline(absl::Time begun, int64_t num_ahead, absl::Time last_deadline,
                               absl::Duration step_timeout) {
  if (num_ahead == 0) return begun + step_timeout;
  return std::clamp(last_deadline, begun, begun + num_ahead * step_timeout) + step_timeout;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_LANE_DEADLINE_H_
