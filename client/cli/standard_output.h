#ifndef EXPERTMESH_CLIENT_CLI_STANDARD_OUTPUT_H_
#define EXPERTMESH_CLIENT_CLI_STANDARD_OUTPUT_H_

#include "absl/status/status.h"

namespace expertmesh {

// Writes what stdio still holds of standard output. Fails where that, or anything written before,
// did not get there: a full disk behind a redirection says so to nobody else. The code is errno's;
// DATA_LOSS where the failure was earlier.
absl::Status FlushStandardOutput();

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_STANDARD_OUTPUT_H_
