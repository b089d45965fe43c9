#ifndef EXPERTMESH_SERVER_MODEL_STRICT_JSON_H_
#define EXPERTMESH_SERVER_MODEL_STRICT_JSON_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace expertmesh {

// Deeper than any config.json, far from any stack's end.
inline constexpr int kMaxJsonDepth = 64;

// OK when `text` is one JSON object (RFC 8259, UTF-8) in which no key occurs twice, at most
// kMaxJsonDepth deep; else INVALID_ARGUMENT with the rule. Parsers commonly let the last of two
// equal keys win, so two programs could read two different models from one file.
absl::Status CheckStrictJson(absl::string_view text);

// Reads a small file as a whole. Errors name the file: NOT_FOUND, INVALID_ARGUMENT when it is no
// regular file or larger than max_bytes, otherwise as the system's error.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, int64_t max_bytes);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_STRICT_JSON_H_
