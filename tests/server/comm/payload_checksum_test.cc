#include "server/comm/payload_checksum.h"

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

TEST(PayloadChecksumTest, PiecesOfWholeBlocksDoNotMatter) {
  const uint64_t seed = 5;
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    const std::vector<std::byte> bytes = RandomBytes(random() % 2000, round);
    PayloadChecksum checksum;
    size_t begin = 0;
    while (bytes.size() - begin > 64) {
      const size_t size = std::min((random() % 5) * 64, (bytes.size() - begin) / 64 * 64);
      checksum.Update(bytes.data() + begin, static_cast<int64_t>(size));
      begin += size;
    }
    checksum.Update(bytes.data() + begin, static_cast<int64_t>(bytes.size() - begin));
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
  // The top bits of two words of one lane.
  bytes = RandomBytes(256, 2);
  const uint64_t plain = Checksum(bytes);
  bytes[7] ^= std::byte{0x80};
  bytes[71] ^= std::byte{0x80};
  EXPECT_NE(Checksum(bytes), plain);
}

}  // namespace
}  // namespace expertmesh
