// How CudaExpertKernels launches the batched format: what the emulated device alone tells.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_expert_kernels.h"
#include "tests/kernels/cpu/random_layer.h"
#include "tests/kernels/cuda/cuda_test_rank.h"
#include "tests/kernels/cuda/emulated_cuda_test.h"

namespace expertmesh {
namespace {

using testing::HasSubstr;

constexpr int64_t kCapacity = 8;

class CudaExpertGraphsTest : public EmulatedCudaTest {
 protected:
  // silu of 24 columns is a part of the first product, gelu a kernel of its own.
  static ExpertLayerShape Shape(Activation activation) {
    ExpertLayerShape shape;
    shape.num_local_experts = 3;
    shape.hidden_size = 40;
    shape.intermediate_size = 24;
    shape.weight_dtype = DType::kBFloat16;
    shape.activation = activation;
    return shape;
  }

  static void ExpectFinishes(Stream& stream) {
    const absl::Status status = stream.Wait(absl::Now() + absl::Minutes(1));
    EXPECT_TRUE(status.ok()) << status;
  }
};

// What the host does for one FFN, rows and counts of which differ each time. Without tensor cores:
// each product of theirs asks the device 8 times, unless it comes in a graph.
TEST_F(CudaExpertGraphsTest, CallsOfTheRuntime) {
  for (const Activation activation : {Activation::kSiluMul, Activation::kGeluMul}) {
    const RandomLayer layer(Shape(activation), /*with_biases=*/false, 3);
    CudaTestRank device;
    const auto kernels = device.NewKernels(layer.shape).value();
    layer.LoadInto(*kernels);
    StepArena arena(device.allocators.device.get());
    std::vector<int64_t> calls;
    for (int32_t round = 0; round < 5; ++round) {
      arena.Reset();
      GroupedFfnParams params;
      params.format = ActivationFormat::kBatched;
      params.activation_dtype = DType::kBFloat16;
      const std::vector<int32_t> num_tokens = {round, 8 - round, 1};
      params.expert_num_tokens = num_tokens;
      params.max_rows_per_expert = kCapacity;
      params.rows = arena.Allocate(3 * kCapacity * 40 * 2).value();
      params.output = arena.AllocateSpan<float>(3 * kCapacity * 40).value().data();
      params.arena = &arena;
      const int64_t before = CountEmulatedCuda().AllCalls();
      ASSERT_TRUE(kernels->GroupedFfn(params, *device.stream).ok());
      // The first round allocates as well.
      if (round > 0) calls.push_back(CountEmulatedCuda().AllCalls() - before);
      ExpectFinishes(*device.stream);
    }
    // Counts; for each product its groups and itself; the activation.
    const int64_t kernels_in_graph = activation == Activation::kSiluMul ? 4 : 5;
    const int64_t plain = 1 + kernels_in_graph;
    // Beside what is captured: begin, end, event, instantiation, template; launch and mark.
    const int64_t capturing = plain + 7;
    // Counts, launch, mark.
    EXPECT_EQ(calls, (std::vector<int64_t>{capturing, 3, 3, 3}));
  }
}

TEST_F(CudaExpertGraphsTest, AnotherSizeOrTypeIsAnotherGraph) {
  const RandomLayer layer(Shape(Activation::kSiluMul), /*with_biases=*/true, 3);
  CudaTestRank device;
  const auto kernels = device.NewKernels(layer.shape).value();
  layer.LoadInto(*kernels);
  StepArena arena(device.allocators.device.get());
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t capacity : {16, 32}) {
      const int64_t before = CountEmulatedCuda().graph_execs;
      for (uint64_t round = 0; round < 4; ++round) {
        const RowsByExpert rows =
            RandomRows(layer.shape, {static_cast<int32_t>(round), 3, 8}, dtype, round);
        arena.Reset();
        const OutputByExpert output =
            RunFfn(*kernels, rows, dtype, ActivationFormat::kBatched,
                   {*device.allocators.device, *device.stream, &arena, capacity});
        ExpectNearReference(layer, rows, output, dtype);
      }
      EXPECT_EQ(CountEmulatedCuda().graph_execs, before + 1);
    }
  }
}

// What stands behind an event is launched, and captured, by the stream's own thread.
TEST_F(CudaExpertGraphsTest, TheStreamsThreadCapturesToo) {
  const RandomLayer layer(Shape(Activation::kSiluMul), /*with_biases=*/false, 3);
  CudaTestRank device;
  const auto kernels = device.NewKernels(layer.shape).value();
  layer.LoadInto(*kernels);
  StepArena arena(device.allocators.device.get());
  const std::vector<int32_t> num_tokens = {kCapacity, kCapacity, kCapacity};
  const RowsByExpert rows = RandomRows(layer.shape, num_tokens, DType::kBFloat16, 4);
  std::vector<std::byte> row_bytes;
  std::vector<float> expected;
  const OutputByExpert by_expert =
      RunFfn(*kernels, rows, DType::kBFloat16, ActivationFormat::kContiguous,
             {*device.allocators.device, *device.stream});
  for (size_t e = 0; e < rows.size(); ++e) {
    const std::vector<std::byte> bytes = ToBytes(rows[e], DType::kBFloat16);
    row_bytes.insert(row_bytes.end(), bytes.begin(), bytes.end());
    expected.insert(expected.end(), by_expert[e].begin(), by_expert[e].end());
  }
  const int64_t output_bytes = static_cast<int64_t>(expected.size() * sizeof(float));
  for (int round = 0; round < 5; ++round) {
    arena.Reset();
    std::byte* const device_rows = arena.Allocate(static_cast<int64_t>(row_bytes.size())).value();
    std::byte* const device_output = arena.Allocate(output_bytes).value();
    GroupedFfnParams params;
    params.format = ActivationFormat::kBatched;
    params.activation_dtype = DType::kBFloat16;
    params.rows = device_rows;
    params.expert_num_tokens = num_tokens;
    params.max_rows_per_expert = kCapacity;
    params.output = reinterpret_cast<float*>(device_output);
    params.arena = &arena;
    std::vector<float> output(expected.size());
    Event before;
    const Event behind;
    absl::Status status = device.stream->WaitFor(before);
    status.Update(
        device.stream->Copy(device_rows, row_bytes.data(), static_cast<int64_t>(row_bytes.size())));
    status.Update(kernels->GroupedFfn(params, *device.stream));
    status.Update(device.stream->Copy(output.data(), device_output, output_bytes));
    status.Update(device.stream->Record(behind));
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(CountEmulatedCuda().graph_launches, std::max(0, round - 1));
    before.Signal();
    // Asks the event alone: nobody but the stream's thread moves the stream on.
    status = behind.Wait(absl::Now() + absl::Minutes(1));
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(output, expected);
    ExpectFinishes(*device.stream);
  }
  EXPECT_EQ(CountEmulatedCuda().graph_launches, 4);
}

TEST_F(CudaExpertGraphsTest, TheDeviceSaysWhyThereAreNone) {
  const RandomLayer layer(Shape(Activation::kSiluMul), /*with_biases=*/false, 3);
  const std::shared_ptr<CudaDevice> device = OpenCudaDevice(0).value();
  std::vector<std::string> heard;
  device->SetGraphErrorListener(
      [&](const absl::Status& error) { heard.push_back(std::string(error.message())); });
  const RowsByExpert rows = RandomRows(layer.shape, {2, 0, 5}, DType::kBFloat16, 4);
  const std::unique_ptr<Stream> stream = device->NewStream();
  StepArena arena(device->allocator().get());
  // Of several layers, whose captures all fail, one is heard of.
  for (int i = 0; i < 2; ++i) {
    const auto kernels = device->NewExpertKernels(layer.shape).value();
    layer.LoadInto(*kernels);
    FailEmulatedCall("cudaStreamBeginCapture", cudaErrorNotSupported);
    for (int round = 0; round < 3; ++round) {
      arena.Reset();
      ExpectNearReference(layer, rows,
                          RunFfn(*kernels, rows, DType::kBFloat16, ActivationFormat::kBatched,
                                 {*device->allocator(), *stream, &arena, kCapacity}),
                          DType::kBFloat16);
    }
  }
  EXPECT_EQ(CountEmulatedCuda().graph_launches, 0);
  ASSERT_EQ(heard.size(), 1u);
  EXPECT_THAT(heard[0], HasSubstr("cudaStreamBeginCapture on cuda:0: "));
}

}  // namespace
}  // namespace expertmesh
