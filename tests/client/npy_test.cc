#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/tensor_file.h"
#include "server/model/safetensors_writer.h"

namespace expertmesh {
namespace {

// A NumPy file, version 1, of this header and so many bytes of data.
std::string Npy(const std::string& header, size_t data_bytes) {
  std::string text = absl::StrCat(std::string("\x93NUMPY\x01", 7), std::string(1, '\0'));
  text.push_back(static_cast<char>(header.size() & 0xff));
  text.push_back(static_cast<char>(header.size() >> 8));
  return absl::StrCat(text, header, std::string(data_bytes, 'x'));
}

std::string Message(const std::string& bytes) {
  return std::string(ParseNpy(bytes).status().message());
}

TEST(NpyTest, ReadsWhatItWrites) {
  FileTensor tensor;
  tensor.dtype = DType::kFloat32;
  tensor.shape = {2, 3};
  tensor.data.resize(24);
  const float values[] = {1, 2, 3, 4, 5, 6};
  memcpy(tensor.data.data(), values, 24);
  const absl::StatusOr<std::string> bytes = FormatNpy(tensor);
  ASSERT_TRUE(bytes.ok());
  EXPECT_EQ((bytes->size() - 24) % 64, 0u);  // numpy.lib.format: data is aligned
  const absl::StatusOr<FileTensor> read = ParseNpy(*bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->dtype, tensor.dtype);
  EXPECT_EQ(read->shape, tensor.shape);
  EXPECT_EQ(read->data, tensor.data);
}

TEST(NpyTest, ReadsWhatNumPyWrites) {
  // numpy.save of an array of one int64, byte for byte as NumPy 1.24 lays out its header.
  const absl::StatusOr<FileTensor> read =
      ParseNpy(Npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }          \n", 8));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->dtype, DType::kInt64);
  EXPECT_EQ(read->shape, std::vector<int64_t>{1});
}

TEST(NpyTest, RefusesWithTheReason) {
  EXPECT_EQ(Message("PK\x03\x04 something else"),
            "not a NumPy file: the first bytes are not \\x93NUMPY");
  EXPECT_EQ(Message("\x93NUMPY\x01"), "not a NumPy file: the first bytes are not \\x93NUMPY");
  EXPECT_EQ(Message(Npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", 8)),
            "element type '<f8'; '<f4', '<f2', '<i4' and '<i8' are read");
  EXPECT_EQ(Message(Npy("{'descr': '<f4', 'fortran_order': True, 'shape': (1,), }", 4)),
            "the array is in Fortran order; save numpy.ascontiguousarray(x)");
  EXPECT_EQ(Message(Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, -1), }", 4)),
            "the shape has a size ' -1'");
  EXPECT_EQ(Message(Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", 23)),
            "shape [2, 3] does not fit 23 bytes of data");
  EXPECT_EQ(
      Message(
          Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }", 0)),
      "shape [4611686018427387904, 4] does not fit 0 bytes of data");
  const std::string whole = Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", 24);
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(ParseNpy(whole.substr(0, size)).ok()) << size;
  }
}

TEST(NpyTest, WhatCannotBeWrittenIsKnownBefore) {
  EXPECT_TRUE(CanWriteTensorFile("/tmp/y.npy", DType::kFloat32).ok());
  EXPECT_TRUE(CanWriteTensorFile("/tmp/y.safetensors", DType::kBFloat16).ok());
  EXPECT_EQ(CanWriteTensorFile("/tmp/y.npy", DType::kBFloat16).message(),
            "/tmp/y.npy: NumPy has no bfloat16; write a .safetensors file, or ask for "
            "--output_dtype=float32");
  EXPECT_EQ(CanWriteTensorFile("/tmp/y.foo", DType::kFloat32).message(),
            "/tmp/y.foo: must end with .npy or .safetensors");
  EXPECT_EQ(CanWriteTensorFile("/no/such/folder/y.npy", DType::kFloat32).message(),
            "/no/such/folder/y.npy: there is no folder /no/such/folder");
}

TEST(TensorFileTest, OfManyTensorsOnlyAFewAreNamed) {
  const std::string path = absl::StrCat(testing::TempDir(), "/many.", getpid(), ".safetensors");
  const float value = 1;
  std::vector<SafetensorsToWrite> tensors;
  for (int i = 100; i < 1100; ++i) {
    tensors.push_back({{absl::StrCat("experts.", i), StoredDType::kF32, {1}},
                       {reinterpret_cast<const std::byte*>(&value), sizeof(value)}});
  }
  ASSERT_TRUE(WriteSafetensors(path, tensors).ok());
  EXPECT_TRUE(ReadTensorFile(path + ":experts.100").ok());
  for (const char* name : {"", ":experts.99"}) {
    const std::string message(ReadTensorFile(path + name).status().message());
    EXPECT_NE(message.find(" experts.100, experts.101, "), std::string::npos) << message;
    EXPECT_NE(message.find(" and 992 more"), std::string::npos) << message;
  }
  std::remove(path.c_str());
}

TEST(NpyTest, NumPyHasNoBFloat16) {
  FileTensor tensor;
  tensor.dtype = DType::kBFloat16;
  EXPECT_EQ(FormatNpy(tensor).status().message(),
            "NumPy has no bfloat16; write a .safetensors file, or ask for --output_dtype=float32");
}

}  // namespace
}  // namespace expertmesh
