#ifndef EXPERTMESH_SERVER_OPS_DURATION_TEXT_H_
#define EXPERTMESH_SERVER_OPS_DURATION_TEXT_H_

#include <string>

#include "absl/time/time.h"

namespace expertmesh {

// A measured duration for people: "5.1s" rather than "5.100071206s". Rounded down to tenths of a
// second, to seconds from a minute on, to milliseconds below a second.
inline std::string DurationText(absl::Duration duration) {
  const absl::Duration unit = duration >= absl::Minutes(1)   ? absl::Seconds(1)
                              : duration >= absl::Seconds(1) ? absl::Milliseconds(100)
                                                             : absl::Milliseconds(1);
  return absl::FormatDuration(absl::Trunc(duration, unit));
}

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_DURATION_TEXT_H_
