#ifndef EXPERTMESH_CLIENT_CLI_STATUS_TEXT_H_
#define EXPERTMESH_CLIENT_CLI_STATUS_TEXT_H_

#include <string>

#include "expertmesh/v1/admin.pb.h"

namespace expertmesh {

// What a person wants to know of a group, with a table of its ranks; ends with a newline.
std::string StatusText(const v1::GetStatusResponse& status);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_STATUS_TEXT_H_
