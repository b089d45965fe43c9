#include "server/rpc/finite_check.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace expertmesh {
namespace {

// Several elements side by side in 64 bits: an element is not finite when its exponent is all ones,
// and then, the other bits cleared, adding one unit of the exponent carries into the sign bit.
struct Lanes {
  uint64_t exponent;
  uint64_t unit;
  uint64_t sign;
  int64_t element_bytes;
};

Lanes LanesOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return {0x7f8000007f800000, 0x0080000000800000, 0x8000000080000000, 4};
    case DType::kFloat16:
      return {0x7c007c007c007c00, 0x0400040004000400, 0x8000800080008000, 2};
    default:
      return {0x7f807f807f807f80, 0x0080008000800080, 0x8000800080008000, 2};
  }
}

// In blocks, so that the loop within has no exit and becomes vector instructions.
constexpr int64_t kBlockWords = 512;

uint64_t AnyNonFinite(const std::byte* data, int64_t num_words, const Lanes& lanes) {
  uint64_t carries = 0;
  for (int64_t i = 0; i < num_words; ++i) {
    uint64_t word;
    std::memcpy(&word, data + 8 * i, 8);
    carries |= (word & lanes.exponent) + lanes.unit;
  }
  return carries & lanes.sign;
}

bool IsNonFinite(const std::byte* element, const Lanes& lanes) {
  uint64_t word = 0;
  std::memcpy(&word, element, static_cast<size_t>(lanes.element_bytes));
  const uint64_t low_sign = uint64_t{1} << (8 * lanes.element_bytes - 1);
  return (((word & lanes.exponent) + lanes.unit) & low_sign) != 0;
}

}  // namespace

int64_t FirstNonFinite(const void* data, DType dtype, int64_t count) {
  const Lanes lanes = LanesOf(dtype);
  const std::byte* bytes = static_cast<const std::byte*>(data);
  const int64_t num_words = count * lanes.element_bytes / 8;
  const int64_t elements_per_word = 8 / lanes.element_bytes;
  int64_t first_unchecked = num_words * elements_per_word;
  for (int64_t word = 0; word < num_words; word += kBlockWords) {
    const int64_t block = std::min(kBlockWords, num_words - word);
    if (AnyNonFinite(bytes + 8 * word, block, lanes) != 0) {
      first_unchecked = word * elements_per_word;
      break;
    }
  }
  for (int64_t i = first_unchecked; i < count; ++i) {
    if (IsNonFinite(bytes + i * lanes.element_bytes, lanes)) return i;
  }
  return -1;
}

}  // namespace expertmesh
