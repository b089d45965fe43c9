#ifndef EXPERTMESH_CLIENT_CLI_FLAG_ERROR_H_
#define EXPERTMESH_CLIENT_CLI_FLAG_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace expertmesh {

// INVALID_ARGUMENT for a command line that no server could make right: the program then exits with
// 2. `message` names the flag, its value and what is valid.
absl::Status FlagError(absl::string_view message);
// A FlagError of the error's message; OK stays OK.
absl::Status FlagErrorOf(const absl::Status& status);
bool IsFlagError(const absl::Status& status);

// The same error with the flag before its message; OK stays OK.
absl::Status OfFlag(absl::string_view flag, const absl::Status& status);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_FLAG_ERROR_H_
