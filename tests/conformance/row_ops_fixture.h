#ifndef EXPERTMESH_TESTS_CONFORMANCE_ROW_OPS_FIXTURE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_ROW_OPS_FIXTURE_H_

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/row_ops.h"
#include "tests/kernels/cpu/random_layer.h"

namespace expertmesh {

// An implementation and the device that it works on.
class RowOpsDevice {
 public:
  virtual ~RowOpsDevice() = default;
  virtual RowOps& row_ops() = 0;
  virtual Stream& stream() = 0;
  virtual Allocator& allocator() = 0;
  // Host memory of the kind that requests have.
  virtual Allocator& request_allocator() = 0;
};

struct RowOpsKind {
  std::string name;
  std::function<std::unique_ptr<RowOpsDevice>()> make;
};

inline std::string RowOpsConformanceName(
    const testing::TestParamInfo<std::tuple<RowOpsKind, DType>>& info) {
  return std::get<0>(info.param).name + "_" + std::string(DTypeName(std::get<1>(info.param)));
}

class RowOpsConformance : public testing::TestWithParam<std::tuple<RowOpsKind, DType>> {
 protected:
  static constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  static constexpr std::byte kPoison{0xab};

  void TearDown() override { EXPECT_TRUE(stream().Wait(Soon()).ok()); }

  static absl::Time Soon() { return absl::Now() + absl::Minutes(5); }
  RowOps& row_ops() { return device_->row_ops(); }
  Stream& stream() { return device_->stream(); }

  // Memory of the device with these bytes, this far behind an aligned address.
  std::byte* Put(const void* bytes, int64_t size_bytes, int64_t misalignment = 0) {
    buffers_.push_back(device_->allocator().Allocate(misalignment + size_bytes).value());
    std::byte* const data = buffers_.back().data() + misalignment;
    EXPECT_TRUE(stream().Copy(data, bytes, size_bytes).ok());
    EXPECT_TRUE(stream().Wait(Soon()).ok());
    return data;
  }
  template <class T>
  T* Put(const std::vector<T>& values) {
    return reinterpret_cast<T*>(
        Put(values.data(), static_cast<int64_t>(values.size() * sizeof(T))));
  }
  std::byte* PutPoison(int64_t size_bytes) {
    return Put(std::vector<std::byte>(static_cast<size_t>(size_bytes), kPoison));
  }
  std::vector<std::byte> Take(const void* data, int64_t size_bytes) {
    std::vector<std::byte> bytes(static_cast<size_t>(size_bytes));
    EXPECT_TRUE(stream().Copy(bytes.data(), data, size_bytes).ok());
    const absl::Status status = stream().Wait(Soon());
    EXPECT_TRUE(status.ok()) << status;
    return bytes;
  }

  std::vector<float> TakeFloats(const float* data, int64_t count) {
    const std::vector<std::byte> bytes = Take(data, count * int64_t{sizeof(float)});
    std::vector<float> values(static_cast<size_t>(count));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  void Gather(const GatherRowsParams& params) {
    const absl::Status status = row_ops().GatherRows(params, stream());
    ASSERT_TRUE(status.ok()) << status;
  }
  void Sum(const SumRowsParams& params) {
    const absl::Status status = row_ops().SumRows(params, stream());
    ASSERT_TRUE(status.ok()) << status;
  }

  // Rows of dtype_, normally distributed.
  std::vector<std::byte> RandomRows(int64_t num_rows, int64_t hidden_size) {
    return ToBytes(RandomValues(random_, num_rows * hidden_size, 1.0, dtype_), dtype_);
  }
  GatherRowsParams GatherFrom(absl::Span<const RowSpan> sources, int64_t hidden_size,
                              absl::Span<const int32_t> row_indices, std::byte* output) const {
    GatherRowsParams params;
    params.sources = sources;
    params.hidden_size = hidden_size;
    params.dtype = dtype_;
    params.row_indices = row_indices;
    params.output = output;
    return params;
  }
  SumRowsParams SumOf(const std::byte* rows, int64_t hidden_size, absl::Span<const int64_t> offsets,
                      absl::Span<const int64_t> row_indices, std::byte* output,
                      DType output_dtype) const {
    SumRowsParams params;
    params.rows = rows;
    params.rows_dtype = dtype_;
    params.hidden_size = hidden_size;
    params.offsets = offsets;
    params.row_indices = row_indices;
    params.output = output;
    params.output_dtype = output_dtype;
    return params;
  }

  const DType dtype_ = std::get<1>(GetParam());
  const int64_t element_bytes_ = DTypeBytes(dtype_);
  const std::unique_ptr<RowOpsDevice> device_ = std::get<0>(GetParam()).make();
  std::vector<Buffer> buffers_;
  std::mt19937_64 random_{7};
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_CONFORMANCE_ROW_OPS_FIXTURE_H_
