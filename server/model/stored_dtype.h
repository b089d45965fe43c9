#ifndef EXPERTMESH_SERVER_MODEL_STORED_DTYPE_H_
#define EXPERTMESH_SERVER_MODEL_STORED_DTYPE_H_

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"
#include "kernels/base/dtype.h"

namespace expertmesh {

// All element types that the safetensors format knows.
enum class StoredDType : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

// As written in a header, e.g. "BF16", "F8_E4M3".
absl::string_view StoredDTypeName(StoredDType dtype);
int64_t StoredDTypeBits(StoredDType dtype);
std::optional<StoredDType> StoredDTypeFromName(absl::string_view name);
// The same type in memory, where kernels/ knows it.
std::optional<DType> ToDType(StoredDType dtype);
// kInvalid has none.
std::optional<StoredDType> ToStoredDType(DType dtype);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_STORED_DTYPE_H_
