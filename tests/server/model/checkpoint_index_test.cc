#include "server/model/checkpoint_index.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/safetensors_writer.h"
#include "tests/server/model/scratch_directory.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

constexpr char kIndexName[] = "model.safetensors.index.json";

void WriteEmptyTensors(const std::string& path, const std::vector<std::string>& names) {
  std::vector<SafetensorsToWrite> tensors;
  for (const std::string& name : names) tensors.push_back({{name, StoredDType::kF32, {0}}, {}});
  ASSERT_TRUE(WriteSafetensors(path, tensors).ok());
}

std::string OpenError(const ScratchDirectory& scratch) {
  return std::string(CheckpointIndex::Open(scratch.path()).status().message());
}

TEST(CheckpointIndexTest, OneFileIsItsOwnIndex) {
  ScratchDirectory scratch;
  WriteEmptyTensors(scratch.File("model.safetensors"), {"a", "b"});
  const auto index = CheckpointIndex::Open(scratch.path());
  ASSERT_TRUE(index.ok()) << index.status();
  ASSERT_NE(index->Find("a"), nullptr);
  EXPECT_EQ(index->Find("a")->tensor->name, "a");
  EXPECT_EQ(index->Find("c"), nullptr);
  EXPECT_EQ(CheckpointIndex::Describe(*index->Find("b")),
            absl::StrCat("file '", scratch.path(), "/model.safetensors': tensor 'b'"));
}

TEST(CheckpointIndexTest, ShardsAreFoundByTheIndexAlone) {
  ScratchDirectory scratch;
  WriteEmptyTensors(scratch.File("x-1.safetensors"), {"a", "hidden"});
  WriteEmptyTensors(scratch.File("x-2.safetensors"), {"b"});
  WriteEmptyTensors(scratch.File("unnamed.safetensors"), {"c"});
  scratch.Write(kIndexName, R"({"metadata":{"total_size":0,"more":[1,{"x":null}]},)"
                            R"("weight_map":{"a":"x-1.safetensors","b":"x-2.safetensors"}})");
  const auto index = CheckpointIndex::Open(scratch.path());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->files().size(), 2u);
  EXPECT_NE(index->Find("a"), nullptr);
  EXPECT_NE(index->Find("b"), nullptr);
  EXPECT_EQ(index->Find("hidden"), nullptr);
  EXPECT_EQ(index->Find("c"), nullptr);
}

TEST(CheckpointIndexTest, NeitherFileNorIndex) {
  ScratchDirectory scratch;
  EXPECT_THAT(OpenError(scratch),
              HasSubstr("has neither model.safetensors nor model.safetensors.index.json"));
}

TEST(CheckpointIndexTest, BadIndexesAreNamed) {
  struct Case {
    std::string index;
    std::string message;
  };
  const std::string deep = std::string(1000, '[') + std::string(1000, ']');
  const std::vector<Case> cases = {
      {"", "is no valid JSON"},
      {"[]", "is no JSON object"},
      {"{}", "key 'weight_map' is missing"},
      {R"({"weight_map":[]})", "key 'weight_map' is missing or no object"},
      {R"({"weight_map":{}})", "'weight_map' is empty"},
      {R"({"weight_map":{"a":1}})", "weight_map['a'] is no string"},
      {R"({"weight_map":{"a":"x.safetensors","a":"y.safetensors"}})", "key 'a' occurs twice"},
      {R"({"x":)" + deep + R"(,"weight_map":{}})", "is nested more than 64 deep"},
      {R"({"weight_map":{"a":"/etc/x.safetensors"}})",
       "weight_map['a'] is '/etc/x.safetensors'; expected a plain file name"},
      {R"({"weight_map":{"a":"../x.safetensors"}})", "expected a plain file name"},
      {R"({"weight_map":{"a":"sub/x.safetensors"}})", "expected a plain file name"},
      {R"({"weight_map":{"a":"..\\x.safetensors"}})", "expected a plain file name"},
      {R"({"weight_map":{"a":"x\u0000.safetensors"}})", "expected a plain file name"},
      {R"({"weight_map":{"a":".."}})", "expected a plain file name"},
      {R"({"weight_map":{"a":""}})", "expected a plain file name"},
      {R"({"weight_map":{"a":"config.json"}})", "expected a plain file name"},
      {R"({"weight_map":{"a":"gone.safetensors"}})", "gone.safetensors': cannot open"},
      {R"({"weight_map":{"z":"x.safetensors"}})", "x.safetensors': tensor 'z' is missing"},
  };
  ScratchDirectory scratch;
  WriteEmptyTensors(scratch.File("x.safetensors"), {"a"});
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.index.substr(0, 80));
    scratch.Write(kIndexName, bad.index);
    EXPECT_THAT(OpenError(scratch), HasSubstr(bad.message));
    EXPECT_THAT(OpenError(scratch), HasSubstr(kIndexName));
  }
}

TEST(CheckpointIndexTest, ABrokenShardNamesItself) {
  ScratchDirectory scratch;
  scratch.Write("x.safetensors", "short");
  scratch.Write(kIndexName, R"({"weight_map":{"a":"x.safetensors"}})");
  EXPECT_THAT(OpenError(scratch), HasSubstr("x.safetensors': file has 5 bytes"));
}

}  // namespace
}  // namespace expertmesh
