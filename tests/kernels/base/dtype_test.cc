#include "kernels/base/dtype.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(DTypeTest, NamesAndBytes) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                            DType::kInt8, DType::kInt32, DType::kInt64}) {
    EXPECT_EQ(DTypeFromName(DTypeName(dtype)), dtype);
    EXPECT_GT(DTypeBytes(dtype), 0);
  }
  EXPECT_EQ(DTypeFromName("invalid"), std::nullopt);
  EXPECT_EQ(DTypeFromName("float64"), std::nullopt);
  EXPECT_EQ(DTypeBytes(DType::kInvalid), 0);
  EXPECT_EQ(DTypeBytes(DType::kBFloat16), 2);
  EXPECT_TRUE(IsActivationDType(DType::kFloat16));
  EXPECT_FALSE(IsActivationDType(DType::kInt32));
}

// What a 16-bit format holds, by its definition: no code shared with the conversion under test.
double Decode(uint32_t bits, int mantissa_bits, int exponent_bits, int bias) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const uint32_t exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const double sign = (bits >> (mantissa_bits + exponent_bits)) != 0 ? -1 : 1;
  const double fraction = static_cast<double>(mantissa) / static_cast<double>(1u << mantissa_bits);
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
  return sign * std::ldexp(1 + fraction, static_cast<int>(exponent) - bias);
}

TEST(DTypeTest, EveryFloat16AndBFloat16GoesToFloatExactlyAndBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float from_half = Float16ToFloat(half);
    if ((bits & 0x7c00) == 0x7c00) {
      EXPECT_EQ(std::isnan(from_half), (bits & 0x3ff) != 0) << bits;
      EXPECT_EQ(std::isinf(from_half), (bits & 0x3ff) == 0) << bits;
    } else {
      EXPECT_EQ(from_half, Decode(bits, 10, 5, 15)) << bits;
    }
    const float from_bfloat = BFloat16ToFloat(half);
    if ((bits & 0x7f80) == 0x7f80) {
      EXPECT_EQ(std::isnan(from_bfloat), (bits & 0x7f) != 0) << bits;
    } else {
      EXPECT_EQ(from_bfloat, Decode(bits, 7, 8, 127)) << bits;
    }
    if (std::isnan(from_half)) {
      EXPECT_TRUE(std::isnan(Float16ToFloat(FloatToFloat16(from_half)))) << bits;
    } else {
      EXPECT_EQ(FloatToFloat16(from_half), half) << bits;
    }
    if (std::isnan(from_bfloat)) {
      EXPECT_TRUE(std::isnan(BFloat16ToFloat(FloatToBFloat16(from_bfloat)))) << bits;
    } else {
      EXPECT_EQ(FloatToBFloat16(from_bfloat), half) << bits;
    }
  }
}

// Between two neighbours: below the middle goes down, above goes up, the middle to the even one.
// All doubles of the middle are exact in float32, since it has more mantissa bits than either
// format.
template <typename Narrow>
void ExpectRoundsToNearestEven(uint16_t low, float low_value, float high_value, Narrow narrow) {
  const float middle = low_value / 2 + high_value / 2;
  const uint16_t high = static_cast<uint16_t>(low + 1);
  EXPECT_EQ(narrow(middle), low % 2 == 0 ? low : high) << low;
  EXPECT_EQ(narrow(std::nextafter(middle, low_value)), low) << low;
  EXPECT_EQ(narrow(std::nextafter(middle, high_value)), high) << low;
}

TEST(DTypeTest, NarrowingRoundsToNearestEven) {
  for (uint16_t bits = 0; bits < 0x7bff; ++bits) {
    ExpectRoundsToNearestEven(bits, Float16ToFloat(bits), Float16ToFloat(bits + 1), FloatToFloat16);
  }
  for (uint16_t bits = 1; bits < 0x7f7f; ++bits) {
    ExpectRoundsToNearestEven(bits, BFloat16ToFloat(bits), BFloat16ToFloat(bits + 1),
                              FloatToBFloat16);
  }
  EXPECT_EQ(FloatToFloat16(65519.996f), 0x7bff);
  EXPECT_EQ(FloatToFloat16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToFloat16(-1e30f), 0xfc00);
  EXPECT_EQ(FloatToFloat16(kInfinity), 0x7c00);
  EXPECT_EQ(FloatToFloat16(-0.0f), 0x8000);
  EXPECT_EQ(FloatToBFloat16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(FloatToBFloat16(-kInfinity), 0xff80);
}

TEST(DTypeTest, NanWithOnlyLowPayloadBitsStaysNan) {
  for (const uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(BFloat16ToFloat(FloatToBFloat16(nan))));
    EXPECT_TRUE(std::isnan(Float16ToFloat(FloatToFloat16(nan))));
    EXPECT_TRUE(std::isnan(Float8E4M3ToFloat(FloatToFloat8E4M3(nan))));
  }
}

TEST(DTypeTest, Float8E4M3) {
  for (uint32_t bits = 0; bits < 0x100; ++bits) {
    const uint8_t byte = static_cast<uint8_t>(bits);
    const float value = Float8E4M3ToFloat(byte);
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      continue;
    }
    EXPECT_EQ(value, Decode(bits, 3, 4, 7)) << bits;
    EXPECT_EQ(FloatToFloat8E4M3(value), byte);
    if (bits < 0x7e) {
      ExpectRoundsToNearestEven(byte, value, Float8E4M3ToFloat(static_cast<uint8_t>(bits + 1)),
                                FloatToFloat8E4M3);
    }
  }
  EXPECT_EQ(FloatToFloat8E4M3(kInfinity), 0x7e);
  EXPECT_EQ(FloatToFloat8E4M3(-1000.0f), 0xfe);
}

TEST(DTypeTest, LoadsAndStoresUnaligned) {
  std::vector<unsigned char> bytes(64, 0);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    void* unaligned = bytes.data() + 1;
    StoreFloat(unaligned, dtype, 3, -1.5f);
    EXPECT_EQ(LoadFloat(unaligned, dtype, 3), -1.5f);
  }
}

}  // namespace
}  // namespace expertmesh
