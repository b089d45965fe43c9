#include "server/model/safetensors_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/safetensors_writer.h"
#include "tests/server/model/scratch_directory.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

absl::Span<const std::byte> Bytes(const std::string& text) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()), text.size());
}

std::string Text(absl::Span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::vector<SafetensorsToWrite> ThreeTensors(const std::string& a, const std::string& b) {
  return {{{"a", StoredDType::kBF16, {3, 1}}, Bytes(a)},
          {{"none", StoredDType::kF32, {0, 4}}, {}},
          {{"b\"\n", StoredDType::kI32, {}}, Bytes(b)}};
}

TEST(SafetensorsFileTest, ReadsWhatTheWriterWrote) {
  ScratchDirectory scratch;
  const std::string a = "abcdef", b = "1234";
  const std::string path = scratch.File("x.safetensors");
  ASSERT_TRUE(WriteSafetensors(path, ThreeTensors(a, b), {{"format", "pt"}}).ok());
  EXPECT_FALSE(std::filesystem::exists(path + ".partial"));

  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->tensors().size(), 3u);
  EXPECT_EQ((*file)->metadata().at("format"), "pt");
  EXPECT_EQ((*file)->Find("c"), nullptr);
  const SafetensorsTensor* tensor = (*file)->Find("a");
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->dtype, StoredDType::kBF16);
  EXPECT_EQ(Text((*file)->Bytes(*tensor)), a);
  (*file)->Prefetch(*tensor, 2, 4);
  std::byte part[3];
  ASSERT_TRUE((*file)->Read(*tensor, 2, absl::MakeSpan(part)).ok());
  EXPECT_EQ(Text(part), "cde");
  ASSERT_NE((*file)->Find("b\"\n"), nullptr);
  EXPECT_EQ(Text((*file)->Bytes(*(*file)->Find("b\"\n"))), b);
  EXPECT_EQ((*file)->Bytes(*(*file)->Find("none")).size(), 0u);
  // Data begins at a multiple of 8 bytes.
  const std::string raw = scratch.Read("x.safetensors");
  EXPECT_EQ((raw.size() - a.size() - b.size()) % 8, 0u);
}

TEST(SafetensorsFileTest, EveryTruncationIsRefused) {
  ScratchDirectory scratch;
  const std::string path = scratch.File("x.safetensors");
  ASSERT_TRUE(WriteSafetensors(path, ThreeTensors("abcdef", "1234")).ok());
  const std::string whole = scratch.Read("x.safetensors");
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::string cut = scratch.Write("cut.safetensors", whole.substr(0, size));
    const auto file = SafetensorsFile::Open(cut);
    ASSERT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << size;
    EXPECT_THAT(std::string(file.status().message()), StartsWith("file '" + cut + "': "));
  }
  EXPECT_FALSE(SafetensorsFile::Open(scratch.Write("longer", whole + "x")).ok());
}

TEST(SafetensorsFileTest, WhatIsNoFileIsRefusedWithoutWaiting) {
  ScratchDirectory scratch;
  const auto missing = SafetensorsFile::Open(scratch.File("none"));
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("/none'"));
  const auto directory = SafetensorsFile::Open(scratch.path());
  EXPECT_THAT(std::string(directory.status().message()), HasSubstr("is not a regular file"));
  ASSERT_EQ(mkfifo(scratch.File("fifo").c_str(), 0600), 0);
  const auto fifo = SafetensorsFile::Open(scratch.File("fifo"));
  EXPECT_THAT(std::string(fifo.status().message()), HasSubstr("is not a regular file"));
}

TEST(SafetensorsFileTest, FollowsSymbolicLinks) {
  // A Hugging Face cache is links into a folder of blobs.
  ScratchDirectory scratch;
  ASSERT_TRUE(WriteSafetensors(scratch.File("blob"), {}).ok());
  ASSERT_EQ(symlink("blob", scratch.File("x.safetensors").c_str()), 0);
  EXPECT_TRUE(SafetensorsFile::Open(scratch.File("x.safetensors")).ok());
}

TEST(SafetensorsWriterTest, RefusesWhatTheReaderWould) {
  ScratchDirectory scratch;
  const auto message = [&](const std::vector<SafetensorsDeclaration>& tensors) {
    return std::string(SafetensorsWriter::Create(scratch.File("x"), tensors).status().message());
  };
  EXPECT_THAT(message({{"a", StoredDType::kF32, {1}}, {"a", StoredDType::kF32, {1}}}),
              HasSubstr("tensor 'a': name occurs twice"));
  EXPECT_THAT(message({{"__metadata__", StoredDType::kF32, {1}}}), HasSubstr("__metadata__"));
  EXPECT_THAT(message({{"\xff", StoredDType::kF32, {1}}}), HasSubstr("UTF-8"));
  EXPECT_THAT(message({{"a", StoredDType::kF32, {-1}}}), HasSubstr("shape [-1] of F32"));
  EXPECT_THAT(message({{"a", StoredDType::kF32, {INT64_MAX, 2}}}), HasSubstr("is no size"));
  EXPECT_THAT(message({{"a", StoredDType::kF4, {1}}}), HasSubstr("is no size in whole bytes"));
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
}

TEST(SafetensorsWriterTest, AFileOfTheNameIsAlwaysWhole) {
  ScratchDirectory scratch;
  const std::string path = scratch.File("x.safetensors");
  {
    auto writer = SafetensorsWriter::Create(
        path, {{"a", StoredDType::kU8, {4}}, {"b", StoredDType::kU8, {2}}});
    ASSERT_TRUE(writer.ok()) << writer.status();
    EXPECT_TRUE((*writer)->Append(Bytes("ab")).ok());
    EXPECT_THAT(std::string((*writer)->Append(Bytes("cde")).message()),
                HasSubstr("tensor 'a': got 5 bytes; declared 4"));
    EXPECT_TRUE((*writer)->Append(Bytes("cd")).ok());
    EXPECT_THAT(std::string((*writer)->Finish().message()),
                HasSubstr("tensor 'b': got 0 bytes; declared 2"));
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
}

TEST(SafetensorsWriterTest, PiecesMakeUpTensors) {
  ScratchDirectory scratch;
  const std::string path = scratch.File("x.safetensors");
  auto writer =
      SafetensorsWriter::Create(path, {{"a", StoredDType::kU8, {4}}, {"b", StoredDType::kU8, {2}}});
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (const char* piece : {"a", "", "bcd", "ef"}) {
    ASSERT_TRUE((*writer)->Append(Bytes(piece)).ok());
  }
  EXPECT_THAT(std::string((*writer)->Append(Bytes("g")).message()),
              HasSubstr("all 2 declared tensors are written already"));
  ASSERT_TRUE((*writer)->Finish().ok());
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(Text((*file)->Bytes(*(*file)->Find("a"))), "abcd");
  EXPECT_EQ(Text((*file)->Bytes(*(*file)->Find("b"))), "ef");
}

TEST(SafetensorsWriterTest, NamesTheFileThatCannotBeMade) {
  const auto status = WriteSafetensors("/nonexistent/x.safetensors", {});
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nonexistent/x.safetensors"));
}

}  // namespace
}  // namespace expertmesh
