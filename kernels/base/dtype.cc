#include "kernels/base/dtype.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>

namespace expertmesh {
namespace {

struct DTypeInfo {
  DType dtype;
  int64_t bytes;
  std::string_view name;
};

constexpr DTypeInfo kDTypes[] = {
    {DType::kInvalid, 0, "invalid"},
    {DType::kFloat32, 4, "float32"},
    {DType::kFloat16, 2, "float16"},
    {DType::kBFloat16, 2, "bfloat16"},
    {DType::kFloat8E4M3, 1, "float8_e4m3"},
    {DType::kInt8, 1, "int8"},
    {DType::kInt32, 4, "int32"},
    {DType::kInt64, 8, "int64"},
};

const DTypeInfo& InfoOf(DType dtype) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.dtype == dtype) return info;
  }
  return kDTypes[0];
}

// Drops the low `shift` bits of `value`, rounding to nearest, ties to even. 1 <= shift <= 31.
uint32_t ShiftRightRoundEven(uint32_t value, int shift) {
  const uint32_t kept = value >> shift;
  const uint32_t rest = value & ((uint32_t{1} << shift) - 1);
  const uint32_t half = uint32_t{1} << (shift - 1);
  return kept + ((rest > half || (rest == half && (kept & 1) != 0)) ? 1 : 0);
}

}  // namespace

int64_t DTypeBytes(DType dtype) { return InfoOf(dtype).bytes; }

std::string_view DTypeName(DType dtype) { return InfoOf(dtype).name; }

std::optional<DType> DTypeFromName(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.name == name && info.dtype != DType::kInvalid) return info.dtype;
  }
  return std::nullopt;
}

bool IsActivationDType(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

float BFloat16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<uint16_t>((bits >> 31 << 15) | 0x7fc0u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

float Float16ToFloat(uint16_t bits) {
  const uint32_t sign = uint32_t{bits} >> 15 << 31;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0x1f) {
    const uint32_t quiet = mantissa != 0 ? 0x400000u : 0;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t FloatToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 31 << 15;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 2^16
  if (magnitude >= 0x38800000u) {  // normal in float16; a carry out of the mantissa is right too
    return static_cast<uint16_t>(sign | ShiftRightRoundEven(magnitude - 0x38000000u, 13));
  }
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);  // below half of 2^-24
  const int shift = 126 - static_cast<int>(magnitude >> 23);        // 14 to 24
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  return static_cast<uint16_t>(sign | ShiftRightRoundEven(mantissa, shift));
}

float Float8E4M3ToFloat(uint8_t bits) {
  const uint32_t sign = uint32_t{bits} >> 7 << 31;
  const uint32_t exponent = (bits >> 3) & 0xf;
  const uint32_t mantissa = bits & 0x7;
  if (exponent == 0xf && mantissa == 0x7) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent == 0) {  // mantissa * 2^-9
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

uint8_t FloatToFloat8E4M3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 31 << 7;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude >= std::bit_cast<uint32_t>(448.0f)) return static_cast<uint8_t>(sign | 0x7eu);
  if (magnitude >= 0x3c800000u) {  // 2^-6 and above is normal
    return static_cast<uint8_t>(sign | ShiftRightRoundEven(magnitude - 0x3c000000u, 20));
  }
  if (magnitude < 0x3a800000u) return static_cast<uint8_t>(sign);  // below half of 2^-9
  const int shift = 141 - static_cast<int>(magnitude >> 23);       // 21 to 24
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  return static_cast<uint8_t>(sign | ShiftRightRoundEven(mantissa, shift));
}

float LoadFloat(const void* data, DType dtype, int64_t index) {
  const std::byte* element = static_cast<const std::byte*>(data) + index * DTypeBytes(dtype);
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, element, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, element, sizeof(bits));
  return dtype == DType::kFloat16 ? Float16ToFloat(bits) : BFloat16ToFloat(bits);
}

void StoreFloat(void* data, DType dtype, int64_t index, float value) {
  std::byte* element = static_cast<std::byte*>(data) + index * DTypeBytes(dtype);
  if (dtype == DType::kFloat32) {
    std::memcpy(element, &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == DType::kFloat16 ? FloatToFloat16(value) : FloatToBFloat16(value);
  std::memcpy(element, &bits, sizeof(bits));
}

bool IsFiniteIn(DType dtype, float value) {
  float rounded;
  StoreFloat(&rounded, dtype, 0, value);
  return std::isfinite(LoadFloat(&rounded, dtype, 0));
}

}  // namespace expertmesh
