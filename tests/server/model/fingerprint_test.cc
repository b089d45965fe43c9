#include "server/model/fingerprint.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/safetensors_writer.h"
#include "tests/server/model/scratch_directory.h"

namespace expertmesh {
namespace {

constexpr int64_t kRows = 4;
constexpr int64_t kRowBytes = 8192;

struct Content {
  std::string name = "t";
  StoredDType dtype = StoredDType::kU8;
  std::vector<int64_t> shape = {kRows, kRowBytes};
  std::vector<std::byte> bytes = std::vector<std::byte>(kRows * kRowBytes);
};

std::string FingerprintOf(const Content& content, int64_t num_pieces, int64_t full_bytes) {
  ScratchDirectory scratch;
  const std::string path = scratch.File("x.safetensors");
  EXPECT_TRUE(
      WriteSafetensors(path, {{{content.name, content.dtype, content.shape}, content.bytes}}).ok());
  const auto file = SafetensorsFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  const CheckpointTensor tensor{*file, &(*file)->tensors()[0]};
  const auto fingerprint = ComputeFingerprint({{&tensor, num_pieces}}, full_bytes);
  EXPECT_TRUE(fingerprint.ok()) << fingerprint.status();
  return *fingerprint;
}

TEST(FingerprintTest, DependsOnNameDTypeAndShape) {
  const std::string base = FingerprintOf({}, 1, INT64_MAX);
  EXPECT_EQ(base.size(), 64u);
  EXPECT_EQ(FingerprintOf({}, 1, INT64_MAX), base);
  EXPECT_NE(FingerprintOf({.name = "u"}, 1, INT64_MAX), base);
  EXPECT_NE(FingerprintOf({.dtype = StoredDType::kI8}, 1, INT64_MAX), base);
  EXPECT_NE(FingerprintOf({.shape = {kRowBytes, kRows}}, 1, INT64_MAX), base);
}

TEST(FingerprintTest, EveryByteCountsUpToTheLimit) {
  const std::string base = FingerprintOf({}, 1, kRows * kRowBytes);
  for (const int64_t at : {int64_t{0}, int64_t{1234}, kRows * kRowBytes - 1}) {
    Content content;
    content.bytes[at] = std::byte{1};
    EXPECT_NE(FingerprintOf(content, 1, kRows * kRowBytes), base) << at;
  }
}

TEST(FingerprintTest, BeyondTheLimitThreePlacesOfEveryPieceCount) {
  const int64_t limit = kRows * kRowBytes - 1;
  const std::string base = FingerprintOf({}, kRows, limit);
  for (int64_t row = 0; row < kRows; ++row) {
    for (const int64_t at : {int64_t{0}, kRowBytes / 2, kRowBytes - 1}) {
      Content content;
      content.bytes[row * kRowBytes + at] = std::byte{1};
      EXPECT_NE(FingerprintOf(content, kRows, limit), base) << row << " " << at;
    }
    Content content;
    content.bytes[row * kRowBytes + kFingerprintSampleBytes + 1] = std::byte{1};
    EXPECT_EQ(FingerprintOf(content, kRows, limit), base) << row;
  }
}

}  // namespace
}  // namespace expertmesh
