#include "server/comm/payload_checksum.h"

#include <map>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

uint64_t Checksum(const std::vector<std::byte>& bytes) {
  PayloadChecksum checksum;
  checksum.Update(bytes.data(), static_cast<int64_t>(bytes.size()));
  return checksum.Finish();
}

std::vector<std::byte> RandomBytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Ranks may have other instruction sets, and been built on different systems. The values are those
// of xxHash's plain C form, around the sizes at which it changes its ways.
TEST(PayloadChecksumTest, IsXxh3) {
  const std::map<size_t, uint64_t> expected = {
      {0, 0x2d06800538d394c2u},   {16, 0x9da23836adf2be1eu},   {240, 0x4917a75c0ef8eed7u},
      {241, 0x541b19226f0052e8u}, {1024, 0x71bee625238addb4u}, {100000, 0xb25cea78018497ffu},
  };
  for (const auto& [size, checksum] : expected) {
    std::vector<std::byte> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + (i >> 8));
    EXPECT_EQ(Checksum(bytes), checksum) << size;
  }
}

TEST(PayloadChecksumTest, EveryFlippedBitCounts) {
  for (const size_t size : {1, 7, 8, 63, 64, 65, 200, 1000}) {
    std::vector<std::byte> bytes = RandomBytes(size, size);
    std::set<uint64_t> seen{Checksum(bytes)};
    for (size_t bit = 0; bit < size * 8; ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
      EXPECT_TRUE(seen.insert(Checksum(bytes)).second) << size << " bytes, bit " << bit;
      bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    }
  }
}

TEST(PayloadChecksumTest, CutsDoNotMatter) {
  const uint64_t seed = 5;
  std::mt19937_64 random(seed);
  PayloadChecksum checksum;
  for (int round = 0; round < 200; ++round) {
    const std::vector<std::byte> bytes = RandomBytes(random() % 2000, static_cast<uint64_t>(round));
    checksum.Reset();
    size_t begin = 0;
    while (begin < bytes.size()) {
      const size_t size = std::min<size_t>(random() % 400, bytes.size() - begin);
      checksum.Update(bytes.data() + begin, static_cast<int64_t>(size));
      begin += size;
    }
    EXPECT_EQ(checksum.Finish(), Checksum(bytes)) << "seed " << seed << " round " << round;
  }
}

TEST(PayloadChecksumTest, LengthAndOrderCount) {
  EXPECT_NE(Checksum(std::vector<std::byte>(63)), Checksum(std::vector<std::byte>(64)));
  EXPECT_NE(Checksum({}), Checksum(std::vector<std::byte>(64)));
  std::vector<std::byte> bytes = RandomBytes(256, 1);
  const uint64_t before = Checksum(bytes);
  std::swap_ranges(bytes.begin(), bytes.begin() + 64, bytes.begin() + 64);
  EXPECT_NE(Checksum(bytes), before);
}

}  // namespace
}  // namespace expertmesh
