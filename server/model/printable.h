#ifndef EXPERTMESH_SERVER_MODEL_PRINTABLE_H_
#define EXPERTMESH_SERVER_MODEL_PRINTABLE_H_

#include <string>

#include "absl/strings/string_view.h"

namespace expertmesh {

// Text from a file, for an error message: in single quotes, escaped to printable ASCII and UTF-8,
// cut to 200 bytes.
std::string Printable(absl::string_view text);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_PRINTABLE_H_
