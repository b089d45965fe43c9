#ifndef EXPERTMESH_TESTS_CONFORMANCE_EXPERT_KERNELS_FIXTURE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_EXPERT_KERNELS_FIXTURE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "kernels/expert_kernels.h"
#include "tests/kernels/cpu/random_layer.h"

namespace expertmesh {

// An implementation and the device that it works on.
class ExpertKernelsDevice {
 public:
  virtual ~ExpertKernelsDevice() = default;
  virtual absl::StatusOr<std::unique_ptr<ExpertKernels>> NewKernels(
      const ExpertLayerShape& shape) = 0;
  virtual Stream& stream() = 0;
  virtual Allocator& allocator() = 0;
};

struct ExpertKernelsKind {
  std::string name;
  std::function<std::unique_ptr<ExpertKernelsDevice>()> make;
};

// `run` is the FFN in that format; `expect_near` looks at each output, and both must have the same
// bytes.
inline void CheckBothFormats(const ExpertLayerShape& shape, uint64_t seed,
                             const std::function<OutputByExpert(ActivationFormat)>& run,
                             const std::function<void(const OutputByExpert&)>& expect_near) {
  OutputByExpert by_format[2];
  for (const ActivationFormat format :
       {ActivationFormat::kContiguous, ActivationFormat::kBatched}) {
    SCOPED_TRACE(FormatName(format) + " hidden " + std::to_string(shape.hidden_size) +
                 " intermediate " + std::to_string(shape.intermediate_size) + " seed " +
                 std::to_string(seed));
    OutputByExpert& output = by_format[static_cast<int>(format)];
    output = run(format);
    expect_near(output);
  }
  EXPECT_EQ(by_format[0], by_format[1]);
}

// Experts on a device, whatever their weights are: a Layer is a RandomLayer or a RandomFloat8Layer.
// A Param begins with implementation and activation dtype.
template <typename Param>
class ExpertKernelsFixture : public testing::TestWithParam<Param> {
 protected:
  const DType activation_dtype_ = std::get<1>(this->GetParam());
  const std::unique_ptr<ExpertKernelsDevice> device_ = std::get<0>(this->GetParam()).make();

  static ExpertLayerShape ShapeOf(int32_t num_experts, int64_t hidden_size,
                                  int64_t intermediate_size, DType weight_dtype) {
    ExpertLayerShape shape;
    shape.num_local_experts = num_experts;
    shape.hidden_size = hidden_size;
    shape.intermediate_size = intermediate_size;
    shape.weight_dtype = weight_dtype;
    return shape;
  }

  std::unique_ptr<ExpertKernels> NewKernels(const ExpertLayerShape& shape) {
    absl::StatusOr<std::unique_ptr<ExpertKernels>> kernels = device_->NewKernels(shape);
    EXPECT_TRUE(kernels.ok()) << kernels.status();
    return *std::move(kernels);
  }
  template <typename Layer>
  std::unique_ptr<ExpertKernels> Load(const Layer& layer) {
    std::unique_ptr<ExpertKernels> kernels = NewKernels(layer.shape);
    layer.LoadInto(*kernels);
    return kernels;
  }

  OutputByExpert Run(ExpertKernels& kernels, const RowsByExpert& rows, ActivationFormat format) {
    return RunFfn(kernels, rows, activation_dtype_, format,
                  {device_->allocator(), device_->stream()});
  }

  // As CheckBothFormats.
  template <typename Layer>
  void CheckLayer(const Layer& layer, const RowsByExpert& rows, uint64_t seed,
                  const std::function<void(const OutputByExpert&,
                                           const ExpertKernels::Capabilities&)>& expect_near) {
    const std::unique_ptr<ExpertKernels> kernels = Load(layer);
    CheckBothFormats(
        layer.shape, seed, [&](ActivationFormat format) { return Run(*kernels, rows, format); },
        [&](const OutputByExpert& output) { expect_near(output, kernels->capabilities()); });
  }

  // The layer has three experts.
  template <typename Layer>
  void ExpectARowsBytesDependOnNothingElse(const Layer& layer) {
    const std::unique_ptr<ExpertKernels> kernels = Load(layer);
    const int64_t hidden_size = layer.shape.hidden_size;
    const RowsByExpert alone_rows = RandomRows(layer.shape, {0, 1, 0}, activation_dtype_, 22);
    const OutputByExpert alone = Run(*kernels, alone_rows, ActivationFormat::kContiguous);
    for (const int32_t num_rows : {1, 2, 3, 5, 7, 13, 40}) {
      for (const int32_t position : {0, num_rows - 1}) {
        SCOPED_TRACE("row " + std::to_string(position) + " of " + std::to_string(num_rows));
        RowsByExpert rows = RandomRows(layer.shape, {num_rows % 5, num_rows, num_rows % 3},
                                       activation_dtype_, static_cast<uint64_t>(num_rows));
        std::copy(alone_rows[1].begin(), alone_rows[1].end(),
                  rows[1].begin() + position * hidden_size);
        const OutputByExpert together =
            Run(*kernels, rows,
                num_rows % 2 == 0 ? ActivationFormat::kContiguous : ActivationFormat::kBatched);
        ASSERT_EQ(std::memcmp(together[1].data() + position * hidden_size, alone[1].data(),
                              static_cast<size_t>(hidden_size) * sizeof(float)),
                  0);
      }
    }
  }

  // The layer has one expert. `check_bad` is given each value of the row that had the NaN or the
  // infinity.
  template <typename Layer>
  void ExpectANanStaysInItsRow(const Layer& layer, const std::function<void(float)>& check_bad) {
    constexpr size_t kBadRow = 5;
    const auto hidden_size = static_cast<size_t>(layer.shape.hidden_size);
    const std::unique_ptr<ExpertKernels> kernels = Load(layer);
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      RowsByExpert rows = RandomRows(layer.shape, {14}, activation_dtype_, 42);
      const OutputByExpert clean = Run(*kernels, rows, ActivationFormat::kBatched);
      rows[0][kBadRow * hidden_size + 3] = bad;
      const OutputByExpert output = Run(*kernels, rows, ActivationFormat::kBatched);
      ASSERT_EQ(output[0].size(), 14 * hidden_size);
      for (size_t i = 0; i < output[0].size(); ++i) {
        if (i / hidden_size == kBadRow) {
          check_bad(output[0][i]);
        } else {
          ASSERT_EQ(output[0][i], clean[0][i]) << i;
        }
      }
    }
  }
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_CONFORMANCE_EXPERT_KERNELS_FIXTURE_H_
