// Input: a safetensors header, then after the last newline the number of bytes that follow it in
// the file, in decimal.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "server/model/safetensors_header.h"

namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "accepted header breaks: %s\n", what);
  std::abort();
}

// What the rest of the loader relies on.
void CheckAccepted(const expertmesh::SafetensorsHeader& header, int64_t data_bytes) {
  int64_t position = 0;
  std::set<std::string> names;
  for (const expertmesh::SafetensorsTensor& tensor : header.tensors) {
    Require(names.insert(tensor.name).second, "names are unique");
    Require(tensor.begin_offset == position, "no hole, no overlap");
    Require(tensor.end_offset >= tensor.begin_offset, "offsets ascend");
    __int128 bits = expertmesh::StoredDTypeBits(tensor.dtype);
    for (const int64_t extent : tensor.shape) {
      Require(extent >= 0, "extents are not negative");
      bits *= extent;
      Require(bits <= INT64_MAX, "sizes do not wrap");
    }
    Require(bits == static_cast<__int128>(tensor.size_bytes()) * 8, "shape and offsets agree");
    position = tensor.end_offset;
  }
  Require(position == data_bytes, "the last tensor ends with the file");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t newline = input.rfind('\n');
  int64_t data_bytes = 0;
  absl::string_view json = input;
  if (newline != absl::string_view::npos) {
    json = input.substr(0, newline);
    if (!absl::SimpleAtoi(input.substr(newline + 1), &data_bytes) || data_bytes < 0) data_bytes = 0;
  }
  const auto header = expertmesh::ParseSafetensorsHeader(json, data_bytes);
  if (header.ok()) CheckAccepted(*header, data_bytes);
  // The same bytes as the first bytes of a file.
  const auto header_bytes = expertmesh::ParseSafetensorsPrefix(input, static_cast<int64_t>(size));
  if (header_bytes.ok()) {
    Require(*header_bytes >= 0 && *header_bytes <= static_cast<int64_t>(size) - 8,
            "the header lies within the file");
  }
  return 0;
}
