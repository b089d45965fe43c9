#include "tests/gpu/bench_rows.h"

#include "gtest/gtest.h"
#include "tests/gpu/device_memory.h"
#include "tests/gpu/device_timer.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"

namespace expertmesh {

// Of device_timer.h: the emulated device has no time.
double SecondsPerLaunch(cudaStream_t stream, const std::function<cudaError_t()>& launch) {
  CheckCuda(launch(), "launch");
  CheckCuda(cudaStreamSynchronize(stream), "what was launched");
  return 1;
}

namespace {

// What gpu_bench holds a GPU's rows to, the CPU's emulated kernels keep.
TEST(BenchRowsTest, EmulatedKernelsAreRight) {
  ResetEmulatedCuda();
  ResultTable table;
  BenchContext context;
  context.table = &table;
  context.shrink = 8192;
  context.copy_gb_per_second = 1;
  ASSERT_EQ(cudaStreamCreateWithFlags(&context.stream, cudaStreamNonBlocking), cudaSuccess);
  BenchRows(context);
  ASSERT_EQ(cudaStreamDestroy(context.stream), cudaSuccess);
  EXPECT_TRUE(table.all_right());
}

}  // namespace
}  // namespace expertmesh
