#ifndef EXPERTMESH_CLIENT_CLI_ERROR_ADVICE_H_
#define EXPERTMESH_CLIENT_CLI_ERROR_ADVICE_H_

#include <string>

#include "absl/status/status.h"

namespace expertmesh {

// What went wrong and what to do about it, for a person at a terminal: the message, then a line of
// advice where the code or the server's reason suggests one.
std::string ErrorWithAdvice(const absl::Status& status);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_ERROR_ADVICE_H_
