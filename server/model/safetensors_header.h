#ifndef EXPERTMESH_SERVER_MODEL_SAFETENSORS_HEADER_H_
#define EXPERTMESH_SERVER_MODEL_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/stored_dtype.h"

// The safetensors format (https://github.com/huggingface/safetensors, README, "Format"): 8 bytes,
// the header's size N as a little-endian uint64; N bytes of JSON, from '{', maybe padded with
// spaces; then the tensors' bytes without holes to the end of the file.

namespace expertmesh {

struct SafetensorsTensor {
  std::string name;
  StoredDType dtype = StoredDType::kF32;
  std::vector<int64_t> shape;
  // Of the bytes, from the first byte after the header.
  int64_t begin_offset = 0;
  int64_t end_offset = 0;

  int64_t size_bytes() const { return end_offset - begin_offset; }
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // ascending offsets
  std::map<std::string, std::string> metadata;
};

// As the reference implementation: parsing larger ones would only serve an attacker.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;
inline constexpr int64_t kSafetensorsPrefixBytes = 8;

// The header's size from the first 8 bytes of a file of `file_bytes`. INVALID_ARGUMENT when the
// file is too small for them or for the header, or the header exceeds the cap.
absl::StatusOr<int64_t> ParseSafetensorsPrefix(absl::string_view prefix, int64_t file_bytes);

// Parses `json`, the header, of a file with `data_bytes` bytes after it. INVALID_ARGUMENT names the
// tensor and the rule: strict JSON, duplicate keys, unknown dtypes and keys, negative, fractional
// or overflowing shapes and offsets, holes, overlaps, bytes that are missing or left over. Nesting
// deeper than the format's is refused at once, so input cannot exhaust the stack. Thread safe.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         int64_t data_bytes);

// "[2, 3]"
std::string ShapeText(const std::vector<int64_t>& shape);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_SAFETENSORS_HEADER_H_
