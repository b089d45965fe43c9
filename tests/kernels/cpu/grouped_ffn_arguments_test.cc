#include <cstdint>
#include <functional>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "kernels/cpu/cpu_kernels.h"
#include "tests/kernels/base/fake_device.h"
#include "tests/kernels/cpu/random_layer.h"

namespace expertmesh {
namespace {

class GroupedFfnArgumentsTest : public testing::Test {
 protected:
  GroupedFfnArgumentsTest() : parallel_for_({}), arena_(&pool_) {
    ExpertLayerShape shape;
    shape.num_local_experts = 2;
    shape.hidden_size = 8;
    shape.intermediate_size = 4;
    shape.weight_dtype = DType::kFloat32;
    layer_ = std::make_unique<RandomLayer>(shape, /*with_biases=*/false, 1);
    kernels_ = layer_->Load(CpuIsa::kPortable, &parallel_for_);
    contiguous_.activation_dtype = DType::kFloat32;
    contiguous_.rows = reinterpret_cast<const std::byte*>(rows_.data());
    contiguous_.expert_offsets = offsets_;
    contiguous_.output = output_.data();
    contiguous_.arena = &arena_;
    batched_ = contiguous_;
    batched_.format = ActivationFormat::kBatched;
    batched_.expert_offsets = {};
    batched_.expert_num_tokens = num_tokens_;
    batched_.max_rows_per_expert = 2;
  }

  absl::StatusCode Code(GroupedFfnParams params,
                        const std::function<void(GroupedFfnParams&)>& change) {
    change(params);
    return kernels_->GroupedFfn(params, *stream_).code();
  }

  HostBufferPool pool_;
  ParallelFor parallel_for_;
  StepArena arena_;
  std::unique_ptr<RandomLayer> layer_;
  std::unique_ptr<ExpertKernels> kernels_;
  std::unique_ptr<Stream> stream_ = NewInlineHostStream();
  std::vector<float> rows_ = std::vector<float>(4 * 8, 1.0f);
  std::vector<float> output_ = std::vector<float>(4 * 8);
  std::vector<int64_t> offsets_ = {0, 1, 4};
  std::vector<int32_t> num_tokens_ = {1, 2};
  GroupedFfnParams contiguous_;
  GroupedFfnParams batched_;
};

TEST_F(GroupedFfnArgumentsTest, TakesWhatFits) {
  EXPECT_EQ(Code(contiguous_, [](GroupedFfnParams&) {}), absl::StatusCode::kOk);
  EXPECT_EQ(Code(batched_, [](GroupedFfnParams&) {}), absl::StatusCode::kOk);
}

// The kernels touch rows, output and arena only in the stream's order: on a device whose memory
// refuses all other accesses they work.
TEST_F(GroupedFfnArgumentsTest, TouchesMemoryInStreamOrderOnly) {
  ASSERT_TRUE(kernels_->GroupedFfn(contiguous_, *stream_).ok());
  FakeDevice device;
  const std::unique_ptr<Stream> device_stream = device.NewStream();
  StepArena arena(&device);
  const int64_t size_bytes = 4 * 8 * 4;
  std::byte* rows = arena.Allocate(size_bytes).value();
  float* output = arena.AllocateSpan<float>(4 * 8).value().data();
  ASSERT_TRUE(device_stream->Copy(rows, rows_.data(), size_bytes).ok());
  GroupedFfnParams params = contiguous_;
  params.rows = rows;
  params.output = output;
  params.arena = &arena;
  ASSERT_TRUE(kernels_->GroupedFfn(params, *device_stream).ok());
  std::vector<float> received(4 * 8);
  ASSERT_TRUE(device_stream->Copy(received.data(), output, size_bytes).ok());
  ASSERT_TRUE(device_stream->Wait(absl::InfiniteFuture()).ok());
  EXPECT_EQ(received, output_);
}

}  // namespace
}  // namespace expertmesh
