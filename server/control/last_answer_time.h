#ifndef EXPERTMESH_SERVER_CONTROL_LAST_ANSWER_TIME_H_
#define EXPERTMESH_SERVER_CONTROL_LAST_ANSWER_TIME_H_

#include <algorithm>

#include "absl/time/time.h"

namespace expertmesh {

// When a call that came at `now` and waits for something must be told that it did not come: an
// answer that arrives after the deadline helps nobody, and a machine that is busy may need long to
// send and to read one. A tenth of the call's whole time before the deadline, within `margin` and
// 250 ms, but at least a fiftieth, for gRPC's clients round that time up by as much as a hundredth
// on its way here, and at most a quarter.
inline absl::Time LastAnswerTime(absl::Time deadline, absl::Time now, absl::Duration margin) {
  const absl::Duration time = deadline - now;
  const absl::Duration tenth = std::min(time / 10, absl::Milliseconds(250));
  return deadline - std::min(std::max({margin, tenth, time / 50}), time / 4);
}

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_LAST_ANSWER_TIME_H_
