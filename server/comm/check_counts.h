#ifndef EXPERTMESH_SERVER_COMM_CHECK_COUNTS_H_
#define EXPERTMESH_SERVER_COMM_CHECK_COUNTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace expertmesh {

// INVALID_ARGUMENT unless `counts`, called `name`, are one for each rank and none is negative.
inline absl::Status CheckCounts(const char* name, absl::Span<const int64_t> counts,
                                int32_t ep_size) {
  if (static_cast<int64_t>(counts.size()) != ep_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", counts.size(), " entries for ", ep_size, " ranks"));
  }
  for (const int64_t count : counts) {
    if (count < 0) return absl::InvalidArgumentError(absl::StrCat(name, ": ", count, " < 0"));
  }
  return absl::OkStatus();
}

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_CHECK_COUNTS_H_
