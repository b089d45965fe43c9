#include "server/model/safetensors_header.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(SafetensorsHeaderTest, ParsesWhatTheSpecificationAllows) {
  const auto header =
      ParseSafetensorsHeader(R"({"__metadata__":{"format":"pt","":"x"},)"
                             R"( "b":{"data_offsets":[4,16],"shape":[2,3],"dtype":"BF16"},)"
                             R"( "a\u00e9":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                             R"( "empty":{"dtype":"I64","shape":[0,7],"data_offsets":[16,16]}}   )",
                             16);
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_THAT(header->tensors, SizeIs(3));
  EXPECT_EQ(header->tensors[0].name, "a\u00e9");
  EXPECT_THAT(header->tensors[0].shape, IsEmpty());
  EXPECT_EQ(header->tensors[1].name, "b");
  EXPECT_EQ(header->tensors[1].dtype, StoredDType::kBF16);
  EXPECT_THAT(header->tensors[1].shape, ElementsAre(2, 3));
  EXPECT_EQ(header->tensors[1].begin_offset, 4);
  EXPECT_EQ(header->tensors[1].end_offset, 16);
  EXPECT_EQ(header->tensors[2].size_bytes(), 0);
  EXPECT_EQ(header->metadata.at("format"), "pt");
}

TEST(SafetensorsHeaderTest, NoTensorsAndNoDataIsAFile) {
  const auto header = ParseSafetensorsHeader("{}", 0);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_THAT(header->tensors, IsEmpty());
}

TEST(SafetensorsHeaderTest, EveryDTypeOfTheSpecificationIsKnown) {
  // Name and bits, as the reference implementation lists them.
  const std::vector<std::pair<std::string, int64_t>> dtypes = {
      {"BOOL", 8}, {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
      {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},
      {"U16", 16}, {"F16", 16},    {"BF16", 16},   {"I32", 32},    {"U32", 32},
      {"F32", 32}, {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};
  for (const auto& [name, bits] : dtypes) {
    SCOPED_TRACE(name);
    // 8 elements are whole bytes in all of them.
    const auto header =
        ParseSafetensorsHeader(absl::StrCat(R"({"t":{"dtype":")", name,
                                            R"(","shape":[8],"data_offsets":[0,)", bits, "]}}"),
                               bits);
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(StoredDTypeName(header->tensors[0].dtype), name);
    EXPECT_EQ(StoredDTypeBits(header->tensors[0].dtype), bits);
  }
}

struct BadHeader {
  std::string rule;  // for people
  std::string json;
  int64_t data_bytes;
  std::string message;
};

constexpr char kGood[] = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";

std::string OneTensor(const std::string& members) { return R"({"t":{)" + members + "}}"; }

std::vector<BadHeader> BadHeaders() {
  const std::string deep(100000, '[');
  return {
      {"empty", "", 0, "header begins with ''; expected '{'"},
      {"first byte is a space", " {}", 0, "header begins with ' '; expected '{'"},
      {"first byte is a byte order mark", "\xef\xbb\xbf{}", 0, "expected '{'"},
      {"an array", "[]", 0, "header begins with '['"},
      {"zero byte", std::string("{}\0", 3), 0, "zero byte at 2"},
      {"padded with a newline", "{}\n", 0, "ends with '\\n'; expected '}'"},
      {"padded with a tab", "{}\t", 0, "expected '}', padded with nothing but spaces"},
      {"two values", "{}{}", 0, "no valid JSON at byte"},
      {"cut off", R"({"a":{"dtype":"F32")", 0, "expected '}'"},
      {"outer object not closed", absl::StrCat("{", kGood), 8, "no valid JSON"},
      {"trailing comma", "{" + std::string(kGood) + ",}", 8, "no valid JSON"},
      {"comment", "{/*x*/" + std::string(kGood) + "}", 8, "no valid JSON"},
      {"single quotes", "{'a':1}", 0, "no valid JSON"},
      {"control character in a name", "{\"a\nb\":1}", 0, "no valid JSON"},
      {"broken UTF-8 in a name", "{\"\xff\":1}", 0, "no valid JSON"},
      {"lone surrogate in a name", R"({"\ud800":1})", 0, "no valid JSON"},
      {"NaN", OneTensor(R"("dtype":"F32","shape":[NaN],"data_offsets":[0,8])"), 8, "valid JSON"},
      {"leading zero", OneTensor(R"("dtype":"F32","shape":[02],"data_offsets":[0,8])"), 8,
       "no valid JSON"},
      {"plus sign", OneTensor(R"("dtype":"F32","shape":[+2],"data_offsets":[0,8])"), 8,
       "no valid JSON"},

      {"name twice", absl::StrCat("{", kGood, ",", kGood, "}"), 8, "tensor 'a': name occurs twice"},
      {"name twice, once escaped",
       absl::StrCat("{", kGood, R"(,"\u0061":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}})"),
       8, "tensor 'a': name occurs twice"},
      {"metadata twice", R"({"__metadata__":{},"__metadata__":{}})", 0,
       "__metadata__: name occurs twice"},
      {"metadata key twice", R"({"__metadata__":{"k":"1","k":"2"}})", 0,
       "__metadata__: key 'k' occurs twice"},
      {"metadata is a list", R"({"__metadata__":[]})", 0,
       "__metadata__: value is an array; expected an object"},
      {"metadata value is a number", R"({"__metadata__":{"k":1}})", 0,
       "__metadata__: value of 'k' is a number; expected a string"},
      {"metadata value is an object", R"({"__metadata__":{"k":{}}})", 0,
       "value of 'k' is an object; expected a string"},
      {"metadata value is null", R"({"__metadata__":{"k":null}})", 0, "value of 'k' is null"},

      {"tensor is a string", R"({"t":"x"})", 0, "tensor 't': value is a string"},
      {"tensor is null", R"({"t":null})", 0, "tensor 't': value is null; expected an object"},
      {"unknown key", OneTensor(R"("dtype":"F32","shape":[],"data_offsets":[0,4],"x":1)"), 4,
       "tensor 't': key 'x' is unknown to the format"},
      {"key twice", OneTensor(R"("dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4])"), 4,
       "tensor 't': key 'dtype' occurs twice"},
      {"no dtype", OneTensor(R"("shape":[],"data_offsets":[0,4])"), 4, "key 'dtype' is missing"},
      {"no shape", OneTensor(R"("dtype":"F32","data_offsets":[0,4])"), 4, "key 'shape' is missing"},
      {"no offsets", OneTensor(R"("dtype":"F32","shape":[])"), 4, "key 'data_offsets' is missing"},
      {"unknown dtype", OneTensor(R"("dtype":"F31","shape":[],"data_offsets":[0,4])"), 4,
       "tensor 't': dtype 'F31' is unknown to the format"},
      {"lower case dtype", OneTensor(R"("dtype":"f32","shape":[],"data_offsets":[0,4])"), 4,
       "dtype 'f32' is unknown"},
      {"dtype is a number", OneTensor(R"("dtype":32,"shape":[],"data_offsets":[0,4])"), 4,
       "dtype is a number; expected a string"},
      {"shape is a number", OneTensor(R"("dtype":"F32","shape":2,"data_offsets":[0,8])"), 8,
       "shape is a number; expected an array of integers"},
      {"shape is an object", OneTensor(R"("dtype":"F32","shape":{},"data_offsets":[0,8])"), 8,
       "shape is an object; expected an array"},
      {"shape holds a string", OneTensor(R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])"), 8,
       "shape[0] is a string; expected an integer"},
      {"shape holds an array", OneTensor(R"("dtype":"F32","shape":[[2]],"data_offsets":[0,8])"), 8,
       "shape[0] is an array; expected an integer"},
      {"negative extent", OneTensor(R"("dtype":"F32","shape":[2,-1],"data_offsets":[0,8])"), 8,
       "tensor 't': shape[1] is -1; expected >= 0"},
      {"fractional extent", OneTensor(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), 8,
       "shape[0] is '2.0'; expected an integer"},
      {"exponent", OneTensor(R"("dtype":"F32","shape":[2e0],"data_offsets":[0,8])"), 8,
       "shape[0] is '2e0'; expected an integer"},
      {"extent of 2^63",
       OneTensor(R"("dtype":"U8","shape":[9223372036854775808],)"
                 R"("data_offsets":[0,8])"),
       8, "shape[0] is 9223372036854775808; expected an integer from 0 to 9223372036854775807"},
      {"extent beyond 2^64",
       OneTensor(R"("dtype":"U8","shape":[18446744073709551624],)"
                 R"("data_offsets":[0,8])"),
       8, "shape[0] is '18446744073709551624'; expected an integer"},
      // 2^32 * 2^32 * 4 + 8 bytes in 64 bits would be 8.
      {"wrapping product",
       OneTensor(R"("dtype":"F32","shape":[4294967296,4294967296],)"
                 R"("data_offsets":[0,0])"),
       0, "overflows"},
      {"product wraps with the dtype",
       OneTensor(R"("dtype":"F64","shape":[2305843009213693952],)"
                 R"("data_offsets":[0,0])"),
       0, "shape [2305843009213693952] of F64 overflows"},
      {"half a byte", OneTensor(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])"), 2,
       "shape [3] of F4 does not fill whole bytes"},
      {"offsets of one", OneTensor(R"("dtype":"F32","shape":[],"data_offsets":[0])"), 4,
       "data_offsets has 1 elements; expected 2"},
      {"offsets of three", OneTensor(R"("dtype":"F32","shape":[],"data_offsets":[0,4,4])"), 4,
       "data_offsets has more than 2 elements"},
      {"negative offset", OneTensor(R"("dtype":"F32","shape":[],"data_offsets":[-4,0])"), 4,
       "data_offsets[0] is -4; expected >= 0"},
      {"offsets swapped", OneTensor(R"("dtype":"F32","shape":[],"data_offsets":[4,0])"), 4,
       "data_offsets [4, 0] end before they begin"},
      {"too few bytes for the shape",
       OneTensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), 4,
       "data_offsets [0, 4] hold 4 bytes; shape [2] of F32 needs 8"},
      {"too many bytes for the shape",
       OneTensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,12])"), 12,
       "hold 12 bytes; shape [2] of F32 needs 8"},
      {"file is cut off", absl::StrCat("{", kGood, "}"), 7,
       "tensor 'a': data_offsets [0, 8] end after the file's 7 bytes of data"},
      {"bytes left over", absl::StrCat("{", kGood, "}"), 9,
       "tensors end at byte 8 of the data; the file goes on to 9"},
      {"bytes without tensors", "{}", 1,
       "tensors end at byte 0 of the data; the file goes on to 1"},
      {"hole at the beginning", OneTensor(R"("dtype":"F32","shape":[],"data_offsets":[4,8])"), 8,
       "tensor 't': data_offsets [4, 8] leave a hole of 4 bytes before it"},
      {"hole in the middle",
       absl::StrCat("{", kGood, R"(,"t":{"dtype":"U8","shape":[1],"data_offsets":[9,10]}})"), 10,
       "tensor 't': data_offsets [9, 10] leave a hole of 1 bytes"},
      {"overlap",
       absl::StrCat("{", kGood, R"(,"t":{"dtype":"U8","shape":[2],"data_offsets":[7,9]}})"), 9,
       "tensor 't': data_offsets [7, 9] overlap the tensor before it by 1 bytes"},
      {"same bytes twice",
       absl::StrCat("{", kGood, R"(,"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})"), 8,
       "overlap the tensor before it by 8 bytes"},
      {"empty tensor beyond the end",
       absl::StrCat("{", kGood, R"(,"t":{"dtype":"F32","shape":[0],"data_offsets":[99,99]}})"), 8,
       "tensor 't': data_offsets [99, 99] end after"},
      {"deep nesting", "{\"t\":" + deep + "}", 0, "value is an array; expected an object"},
      {"deep nesting of objects", "{\"t\":{\"shape\":" + deep + "}}", 0,
       "shape[0] is an array; expected an integer"},
  };
}

TEST(SafetensorsHeaderTest, EveryBrokenRuleIsNamed) {
  for (const BadHeader& bad : BadHeaders()) {
    SCOPED_TRACE(bad.rule);
    const auto header = ParseSafetensorsHeader(bad.json, bad.data_bytes);
    EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument) << header.status();
    EXPECT_THAT(std::string(header.status().message()), HasSubstr(bad.message));
  }
}

TEST(SafetensorsHeaderTest, MessagesStayShortAndPrintable) {
  const std::string name = std::string(100000, 'x') + "\\u0007";
  const auto header = ParseSafetensorsHeader("{\"" + name + "\":1}", 0);
  EXPECT_LT(header.status().message().size(), 500u);
  const auto bell = ParseSafetensorsHeader(R"({"\u0007\n":1})", 0);
  EXPECT_THAT(std::string(bell.status().message()), HasSubstr("tensor '\\x07\\n'"));
}

std::string Prefix(uint64_t header_bytes) {
  std::string prefix;
  for (int i = 0; i < 8; ++i) prefix.push_back(static_cast<char>(header_bytes >> (8 * i)));
  return prefix;
}

TEST(SafetensorsPrefixTest, SizeMustFitFileAndCap) {
  EXPECT_EQ(*ParseSafetensorsPrefix(Prefix(2), 10), 2);
  EXPECT_EQ(*ParseSafetensorsPrefix(Prefix(0), 8), 0);
  EXPECT_EQ(*ParseSafetensorsPrefix(Prefix(100'000'000), 200'000'000), 100'000'000);
  const auto message = [](const std::string& prefix, int64_t file_bytes) {
    return std::string(ParseSafetensorsPrefix(prefix, file_bytes).status().message());
  };
  EXPECT_THAT(message("", 0), HasSubstr("file has 0 bytes"));
  EXPECT_THAT(message("1234567", 7), HasSubstr("file has 7 bytes"));
  EXPECT_THAT(message(Prefix(3), 10), HasSubstr("header size is 3 bytes; the file has 2 after"));
  EXPECT_THAT(message(Prefix(100'000'001), int64_t{1} << 40),
              HasSubstr("header size is 100000001 bytes; expected at most 100000000"));
  EXPECT_THAT(message(Prefix(UINT64_MAX), 10), HasSubstr("18446744073709551615"));
  EXPECT_THAT(message(Prefix(uint64_t{1} << 63), 10), HasSubstr("9223372036854775808"));
}

}  // namespace
}  // namespace expertmesh
