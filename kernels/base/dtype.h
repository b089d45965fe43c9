#ifndef EXPERTMESH_KERNELS_BASE_DTYPE_H_
#define EXPERTMESH_KERNELS_BASE_DTYPE_H_

#include <cstdint>
#include <optional>
#include <string_view>

namespace expertmesh {

// Element types of tensors in memory. All multi-byte types are little-endian.
enum class DType : uint8_t {
  kInvalid = 0,
  kFloat32,     // IEEE 754 binary32
  kFloat16,     // IEEE 754 binary16
  kBFloat16,    // upper half of binary32
  kFloat8E4M3,  // OCP E4M3FN: no infinities, NaN is 0x7f/0xff
  kInt8,
  kInt32,
  kInt64,
};

// Bytes of one element; 0 for kInvalid.
int64_t DTypeBytes(DType dtype);

// "float32", "float16", "bfloat16", "float8_e4m3", "int8", "int32", "int64", "invalid".
std::string_view DTypeName(DType dtype);
std::optional<DType> DTypeFromName(std::string_view name);

// float32, float16 and bfloat16: what hidden states, outputs and partials may be.
bool IsActivationDType(DType dtype);

// Scalar conversions. Narrowing rounds to nearest, ties to even; overflow gives infinity; NaN stays
// NaN (quiet), its payload is not kept. Out of line on purpose: files compiled for newer
// instruction sets must not carry inline copies.
float BFloat16ToFloat(uint16_t bits);
uint16_t FloatToBFloat16(float value);
float Float16ToFloat(uint16_t bits);
uint16_t FloatToFloat16(float value);
float Float8E4M3ToFloat(uint8_t bits);
// Saturates to +-448, as in the OCP 8-bit floating point specification, section 5.1 (saturating
// mode).
uint8_t FloatToFloat8E4M3(float value);

// Element `index` of an array of float32, float16 or bfloat16 that may be unaligned.
float LoadFloat(const void* data, DType dtype, int64_t index);
void StoreFloat(void* data, DType dtype, int64_t index, float value);

// `value`, rounded to float32, float16 or bfloat16, is neither an infinity nor NaN.
bool IsFiniteIn(DType dtype, float value);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_DTYPE_H_
