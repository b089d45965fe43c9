#include "server/rpc/finite_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

TEST(FiniteCheckTest, EveryPatternOfSixteenBits) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const uint16_t element = static_cast<uint16_t>(bits);
      const bool finite = std::isfinite(LoadFloat(&element, dtype, 0));
      ASSERT_EQ(FirstNonFinite(&element, dtype, 1), finite ? -1 : 0) << bits;
      const uint16_t four[4] = {0x1234, element, 0x8000, 0x3c00};
      ASSERT_EQ(FirstNonFinite(four, dtype, 4), finite ? -1 : 1) << bits;
    }
  }
}

// Neighbours whose sums would carry into the next lane if anything did.
TEST(FiniteCheckTest, LargestFiniteNeighboursDoNotDisturb) {
  const std::vector<uint16_t> bf16(64, 0x7f7f);
  EXPECT_EQ(FirstNonFinite(bf16.data(), DType::kBFloat16, 64), -1);
  const std::vector<uint16_t> f16(64, 0xfbff);
  EXPECT_EQ(FirstNonFinite(f16.data(), DType::kFloat16, 64), -1);
  const std::vector<uint32_t> f32(64, 0xff7fffff);
  EXPECT_EQ(FirstNonFinite(f32.data(), DType::kFloat32, 64), -1);
}

TEST(FiniteCheckTest, FindsTheFirstAtAnyPlaceLengthAndAlignment) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 2000; ++round) {
    const DType dtype =
        std::vector<DType>{DType::kFloat32, DType::kFloat16, DType::kBFloat16}[random() % 3];
    const int64_t count = static_cast<int64_t>(random() % 6000);
    std::vector<std::byte> bytes(static_cast<size_t>(count * DTypeBytes(dtype)) + 8);
    std::byte* data = bytes.data() + random() % 8;
    for (int64_t i = 0; i < count; ++i) {
      StoreFloat(data, dtype, i, static_cast<float>(random() % 1000) - 500.0f);
    }
    int64_t expected = -1;
    const int num_bad = count == 0 ? 0 : static_cast<int>(random() % 3);
    for (int i = 0; i < num_bad; ++i) {
      const int64_t at = static_cast<int64_t>(random()) % count;
      StoreFloat(data, dtype, at, random() % 2 == 0 ? -INFINITY : NAN);
      if (expected < 0 || at < expected) expected = at;
    }
    ASSERT_EQ(FirstNonFinite(data, dtype, count), expected);
  }
}

}  // namespace
}  // namespace expertmesh
