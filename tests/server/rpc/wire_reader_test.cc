#include "server/rpc/wire_reader.h"

#include <string>

#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

// By the definition of Unicode, character by character.
bool IsUtf8ByDefinition(const std::string& text) {
  size_t at = 0;
  while (at < text.size()) {
    const auto lead = static_cast<uint8_t>(text[at]);
    const size_t length = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (lead >= 0x80 && lead < 0xc0) return false;
    if (lead >= 0xf8 || at + length > text.size()) return false;
    uint32_t code = length == 1 ? lead : lead & (0x7f >> length);
    for (size_t i = 1; i < length; ++i) {
      const auto byte = static_cast<uint8_t>(text[at + i]);
      if ((byte & 0xc0) != 0x80) return false;
      code = code << 6 | (byte & 0x3f);
    }
    static constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
    if (code < kSmallest[length] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) {
      return false;
    }
    at += length;
  }
  return true;
}

TEST(WireReaderTest, Utf8OfAllShortTexts) {
  // All of up to 2 bytes; those of 3 and 4 whose bytes lie about the borders.
  for (int first = 0; first < 256; ++first) {
    for (int second = 0; second < 256; ++second) {
      const std::string text = {static_cast<char>(first), static_cast<char>(second)};
      ASSERT_EQ(IsValidUtf8(text), IsUtf8ByDefinition(text)) << first << " " << second;
      ASSERT_EQ(IsValidUtf8(text.substr(1)), IsUtf8ByDefinition(text.substr(1))) << second;
    }
  }
  static constexpr int kBorders[] = {0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xff};
  for (int first = 0xc0; first < 256; ++first) {
    for (const int second : kBorders) {
      for (const int third : kBorders) {
        for (const int fourth : kBorders) {
          const std::string text = {static_cast<char>(first), static_cast<char>(second),
                                    static_cast<char>(third), static_cast<char>(fourth)};
          ASSERT_EQ(IsValidUtf8(text), IsUtf8ByDefinition(text))
              << first << " " << second << " " << third << " " << fourth;
          ASSERT_EQ(IsValidUtf8(text.substr(0, 3)), IsUtf8ByDefinition(text.substr(0, 3)))
              << first << " " << second << " " << third;
        }
      }
    }
  }
  EXPECT_TRUE(IsValidUtf8(""));
}

TEST(WireReaderTest, ReadsNoFurtherThanTheSizeItWasGiven) {
  const std::string bytes = "\x05\x06\x07";
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()));
  WireReader reader(&stream, 2);
  uint64_t value = 0;
  EXPECT_TRUE(reader.ReadVarint(&value));
  EXPECT_EQ(value, 5u);
  EXPECT_EQ(reader.remaining(), 1);
  char two[2];
  EXPECT_FALSE(reader.ReadRaw(two, 2));
  EXPECT_TRUE(reader.ReadVarint(&value));
  EXPECT_EQ(reader.position(), 2);
  EXPECT_FALSE(reader.ReadVarint(&value));
  EXPECT_FALSE(reader.Skip(1));
}

TEST(WireReaderTest, AStreamShorterThanItsSizeIsMalformed) {
  const std::string bytes = "\x05";
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()));
  WireReader reader(&stream, 10);
  EXPECT_FALSE(reader.Skip(2));
}

}  // namespace
}  // namespace expertmesh
