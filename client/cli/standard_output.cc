#include "client/cli/standard_output.h"

#include <cerrno>
#include <cstdio>

namespace expertmesh {

absl::Status FlushStandardOutput() {
  constexpr char kMessage[] = "standard output cannot be written";
  const bool failed_before = ferror(stdout) != 0;
  if (fflush(stdout) != 0) return absl::ErrnoToStatus(errno, kMessage);
  return failed_before ? absl::DataLossError(kMessage) : absl::OkStatus();
}

}  // namespace expertmesh
