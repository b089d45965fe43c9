#ifndef EXPERTMESH_KERNELS_BASE_CHECKED_MATH_H_
#define EXPERTMESH_KERNELS_BASE_CHECKED_MATH_H_

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace expertmesh {

// Arithmetic on sizes that came from outside: nullopt on signed 64-bit overflow.
inline std::optional<int64_t> CheckedAdd(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_add_overflow(a, b, &result)) return std::nullopt;
  return result;
}

inline std::optional<int64_t> CheckedMul(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

// Product of all factors; also nullopt when one of them is negative (a size never is). The product
// of none is 1.
inline std::optional<int64_t> CheckedSizeProduct(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (factor < 0) return std::nullopt;
    if (__builtin_mul_overflow(product, factor, &product)) return std::nullopt;
  }
  return product;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_CHECKED_MATH_H_
