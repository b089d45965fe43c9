#ifndef EXPERTMESH_SERVER_OPS_SHOWN_TEXT_H_
#define EXPERTMESH_SERVER_OPS_SHOWN_TEXT_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace expertmesh {

// Text that came from outside, or may hold some, as people and protobuf's strings take it: at most
// `max_bytes` of it and then "...", control characters and what is no UTF-8 replaced by '?'.
std::string ShownText(absl::string_view text, size_t max_bytes);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_SHOWN_TEXT_H_
