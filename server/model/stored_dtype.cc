#include "server/model/stored_dtype.h"

#include <iterator>

namespace expertmesh {
namespace {

struct StoredDTypeRow {
  StoredDType dtype;
  const char* name;
  int bits;
  DType in_memory;  // kInvalid: kernels/ does not know it
};

// In the order of the enum.
constexpr StoredDTypeRow kRows[] = {
    {StoredDType::kBool, "BOOL", 8, DType::kInvalid},
    {StoredDType::kF4, "F4", 4, DType::kInvalid},
    {StoredDType::kF6E2M3, "F6_E2M3", 6, DType::kInvalid},
    {StoredDType::kF6E3M2, "F6_E3M2", 6, DType::kInvalid},
    {StoredDType::kU8, "U8", 8, DType::kInvalid},
    {StoredDType::kI8, "I8", 8, DType::kInt8},
    {StoredDType::kF8E5M2, "F8_E5M2", 8, DType::kInvalid},
    {StoredDType::kF8E4M3, "F8_E4M3", 8, DType::kFloat8E4M3},
    {StoredDType::kF8E8M0, "F8_E8M0", 8, DType::kInvalid},
    {StoredDType::kF8E4M3Fnuz, "F8_E4M3FNUZ", 8, DType::kInvalid},
    {StoredDType::kF8E5M2Fnuz, "F8_E5M2FNUZ", 8, DType::kInvalid},
    {StoredDType::kI16, "I16", 16, DType::kInvalid},
    {StoredDType::kU16, "U16", 16, DType::kInvalid},
    {StoredDType::kF16, "F16", 16, DType::kFloat16},
    {StoredDType::kBF16, "BF16", 16, DType::kBFloat16},
    {StoredDType::kI32, "I32", 32, DType::kInt32},
    {StoredDType::kU32, "U32", 32, DType::kInvalid},
    {StoredDType::kF32, "F32", 32, DType::kFloat32},
    {StoredDType::kC64, "C64", 64, DType::kInvalid},
    {StoredDType::kF64, "F64", 64, DType::kInvalid},
    {StoredDType::kI64, "I64", 64, DType::kInt64},
    {StoredDType::kU64, "U64", 64, DType::kInvalid},
};

constexpr bool RowsFollowTheEnum() {
  for (size_t i = 0; i < std::size(kRows); ++i) {
    if (kRows[i].dtype != static_cast<StoredDType>(i)) return false;
  }
  return std::size(kRows) == static_cast<size_t>(StoredDType::kU64) + 1;
}
static_assert(RowsFollowTheEnum());

const StoredDTypeRow& Row(StoredDType dtype) { return kRows[static_cast<size_t>(dtype)]; }

}  // namespace

absl::string_view StoredDTypeName(StoredDType dtype) { return Row(dtype).name; }

int64_t StoredDTypeBits(StoredDType dtype) { return Row(dtype).bits; }

std::optional<StoredDType> StoredDTypeFromName(absl::string_view name) {
  for (const StoredDTypeRow& row : kRows) {
    if (name == row.name) return row.dtype;
  }
  return std::nullopt;
}

std::optional<DType> ToDType(StoredDType dtype) {
  const DType in_memory = Row(dtype).in_memory;
  if (in_memory == DType::kInvalid) return std::nullopt;
  return in_memory;
}

std::optional<StoredDType> ToStoredDType(DType dtype) {
  if (dtype == DType::kInvalid) return std::nullopt;
  for (const StoredDTypeRow& row : kRows) {
    if (row.in_memory == dtype) return row.dtype;
  }
  return std::nullopt;
}

}  // namespace expertmesh
