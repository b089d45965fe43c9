#include "kernels/cuda/cuda_row_ops.h"

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_kernels.h"
#include "tests/kernels/cpu/random_layer.h"
#include "tests/kernels/cuda/cuda_test_rank.h"
#include "tests/kernels/cuda/emulated_cuda_test.h"

namespace expertmesh {
namespace {

class CudaRowOpsTest : public EmulatedCudaTest {
 protected:
  static absl::Time Soon() { return absl::Now() + absl::Minutes(2); }
};

TEST_F(CudaRowOpsTest, RefusesAStreamOfTheHost) {
  CudaTestRank rank;
  const std::unique_ptr<Stream> host = NewInlineHostStream();
  GatherRowsParams params;
  params.dtype = DType::kFloat32;
  params.hidden_size = 1;
  EXPECT_EQ(rank.row_ops->GatherRows(params, *host).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(rank.row_ops->GatherRows(params, *rank.stream).ok());
}

// The sigmoid's bytes are those of every CPU that has fused multiply-add.
TEST_F(CudaRowOpsTest, SigmoidDotHasTheBytesOfTheCpu) {
  const CpuIsa isa = SupportedCpuIsas().back();
  if (isa == CpuIsa::kPortable) GTEST_SKIP() << "this CPU has no fused multiply-add";
  const int64_t num_rows = 9;
  const int64_t hidden_size = 333;
  std::mt19937_64 random(11);
  const std::vector<std::byte> rows = ToBytes(
      RandomValues(random, num_rows * hidden_size, 1.0, DType::kBFloat16), DType::kBFloat16);
  const std::vector<double> wide = RandomValues(random, hidden_size, 0.1, DType::kFloat32);
  const std::vector<float> vector(wide.begin(), wide.end());
  SigmoidDotParams params;
  params.rows = rows.data();
  params.rows_dtype = DType::kBFloat16;
  params.num_rows = num_rows;
  params.hidden_size = hidden_size;
  params.vector = vector.data();
  std::vector<float> expected(num_rows);
  params.output = expected.data();
  ParallelFor parallel_for(ParallelForOptions{});
  const std::unique_ptr<Stream> host = NewInlineHostStream();
  ASSERT_TRUE(NewCpuRowOps(isa, &parallel_for).value()->SigmoidDot(params, *host).ok());

  CudaTestRank rank;
  Stream& stream = *rank.stream;
  const auto put = [&](const void* bytes, int64_t size_bytes) {
    Buffer buffer = rank.allocators.device->Allocate(size_bytes).value();
    EXPECT_TRUE(stream.Copy(buffer.data(), bytes, size_bytes).ok());
    return buffer;
  };
  const Buffer device_rows = put(rows.data(), static_cast<int64_t>(rows.size()));
  const Buffer device_vector = put(vector.data(), hidden_size * int64_t{sizeof(float)});
  const Buffer device_output = rank.allocators.device->Allocate(num_rows * 4).value();
  params.rows = device_rows.data();
  params.vector = reinterpret_cast<const float*>(device_vector.data());
  params.output = reinterpret_cast<float*>(device_output.data());
  ASSERT_TRUE(rank.row_ops->SigmoidDot(params, stream).ok());
  std::vector<float> actual(num_rows);
  ASSERT_TRUE(stream.Copy(actual.data(), device_output.data(), num_rows * 4).ok());
  ASSERT_TRUE(stream.Wait(Soon()).ok());
  EXPECT_EQ(actual, expected);
}

// Lists that a step forgot to send are an error, never bytes of something else.
TEST_F(CudaRowOpsTest, RefusesListsThatWereNotSent) {
  CudaTestRank rank;
  StepArena arena(rank.allocators.device.get());
  StepArena host_arena(rank.allocators.pinned.get());
  StepLists lists(&arena, &host_arena);
  const Buffer rows = rank.allocators.device->Allocate(64).value();
  const RowSpan source = {rows.data(), 4};
  const int32_t indices[] = {1};
  const int64_t destinations[] = {0};
  GatherRowsParams params;
  params.sources = absl::MakeConstSpan(&source, 1);
  params.dtype = DType::kFloat32;
  params.hidden_size = 4;
  params.row_indices = indices;
  params.output = rows.data();
  params.lists = &lists;
  lists.Add(params.row_indices);
  EXPECT_EQ(rank.row_ops->GatherRows(params, *rank.stream).code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(lists.Send(*rank.stream).ok());
  EXPECT_TRUE(rank.row_ops->GatherRows(params, *rank.stream).ok());
  params.destination_indices = destinations;
  const absl::Status status = rank.row_ops->GatherRows(params, *rank.stream);
  EXPECT_EQ(status.message(), "lists: has not sent destination_indices");
  EXPECT_TRUE(rank.stream->Wait(Soon()).ok());
}

// Large spans of pinned memory cross from where they lie, and what stands between them in one copy.
TEST_F(CudaRowOpsTest, UploadsInFewCopies) {
  CudaTestRank rank;
  StepArena host_arena(rank.allocators.pinned.get());
  constexpr int64_t kRowBytes = 1 << 10;
  const Buffer large = rank.allocators.pinned->Allocate(128 * kRowBytes).value();
  const Buffer small = rank.allocators.pinned->Allocate(2 * kRowBytes).value();
  const std::vector<std::byte> pageable(static_cast<size_t>(200 * kRowBytes));
  const Buffer output = rank.allocators.device->Allocate(700 * kRowBytes).value();
  const auto copies = [&](const std::vector<RowSpan>& sources) {
    const int64_t before = CountEmulatedCuda().host_to_device.number;
    UploadRowsParams params;
    params.sources = sources;
    params.row_bytes = kRowBytes;
    params.output = output.data();
    params.host_arena = &host_arena;
    EXPECT_TRUE(rank.row_ops->UploadRows(params, *rank.stream).ok());
    EXPECT_TRUE(rank.stream->Wait(Soon()).ok());
    return CountEmulatedCuda().host_to_device.number - before;
  };
  const RowSpan a = {large.data(), 128};
  const RowSpan b = {small.data(), 2};
  const RowSpan c = {pageable.data(), 200};
  EXPECT_EQ(copies({}), 0);
  EXPECT_EQ(copies({{nullptr, 0}}), 0);
  EXPECT_EQ(copies({a, a}), 2);
  EXPECT_EQ(copies({b, b, c, b}), 1);
  EXPECT_EQ(copies({b, c, a, b, {nullptr, 0}, b}), 3);
  const int64_t packed = host_arena.allocated_bytes();
  EXPECT_EQ(copies({b}), 1);
  EXPECT_EQ(host_arena.allocated_bytes(), packed);
  EXPECT_EQ(CountEmulatedCuda().pageable_copies, 0);
}

// What a call needs on the device goes back when the stream has passed it, whatever became of it.
TEST_F(CudaRowOpsTest, TakesNoMemoryForGood) {
  CudaTestRank rank;
  const std::vector<float> rows(8, 1.0f);
  const RowSpan source = {reinterpret_cast<const std::byte*>(rows.data()), 2};
  const int32_t indices[] = {1, 0};
  GatherRowsParams params;
  params.sources = absl::MakeConstSpan(&source, 1);
  params.dtype = DType::kFloat32;
  params.hidden_size = 4;
  params.row_indices = indices;
  const Buffer output = rank.allocators.device->Allocate(32).value();
  params.output = output.data();
  const int64_t before = rank.allocators.device->usage().allocated_bytes;
  for (int i = 0; i < 3; ++i) {
    if (i == 1) FailEmulatedCall("cudaMemcpyAsync", cudaErrorInvalidValue);
    ASSERT_TRUE(rank.row_ops->GatherRows(params, *rank.stream).ok());
    EXPECT_EQ(rank.stream->Wait(Soon()).ok(), i != 1);
    rank.stream->ClearError();
    EXPECT_EQ(rank.allocators.device->usage().allocated_bytes, before);
    EXPECT_EQ(rank.allocators.pinned->usage().allocated_bytes, 0);
  }
}

}  // namespace
}  // namespace expertmesh
