#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/emulated_cuda_test.h"

namespace expertmesh {
namespace {

class EmulatedCudaGraphsTest : public EmulatedCudaTest {
 protected:
  EmulatedCudaGraphsTest() {
    for (cudaStream_t* stream : {&stream_, &other_}) {
      EXPECT_EQ(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), cudaSuccess);
    }
  }
  ~EmulatedCudaGraphsTest() override {
    for (const cudaStream_t stream : {stream_, other_}) {
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    }
  }

  cudaError_t Begin() { return cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal); }
  cudaError_t Enqueue(int what) {
    return EnqueueEmulatedWork(stream_, [this, what] {
      done_.push_back(what);
      return cudaSuccess;
    });
  }
  cudaGraphExec_t Instantiate(cudaGraph_t graph) {
    cudaGraphExec_t exec = nullptr;
    EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return exec;
  }

  cudaStream_t stream_ = nullptr;
  cudaStream_t other_ = nullptr;
  std::vector<int> done_;
};

TEST_F(EmulatedCudaGraphsTest, CapturedWorkRunsWhereTheGraphIsLaunched) {
  ASSERT_EQ(Enqueue(1), cudaSuccess);
  ASSERT_EQ(Begin(), cudaSuccess);
  ASSERT_EQ(Enqueue(2), cudaSuccess);
  ASSERT_EQ(Enqueue(3), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  ASSERT_EQ(Enqueue(4), cudaSuccess);
  const cudaGraphExec_t exec = Instantiate(graph);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(done_, (std::vector<int>{1, 4}));
  for (int i = 0; i < 2; ++i) ASSERT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
  ASSERT_EQ(Enqueue(5), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(done_, (std::vector<int>{1, 4, 2, 3, 2, 3, 5}));
  EXPECT_EQ(CountEmulatedCuda().graph_execs, 1);
  EXPECT_EQ(CountEmulatedCuda().graph_launches, 2);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
}

// Whatever order streams run in.
TEST_F(EmulatedCudaGraphsTest, AGraphWaitsForItself) {
  ASSERT_EQ(Begin(), cudaSuccess);
  for (const int what : {1, 2, 3}) ASSERT_EQ(Enqueue(what), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  const cudaGraphExec_t exec = Instantiate(graph);
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(cudaGraphLaunch(exec, i % 2 == 0 ? stream_ : other_), cudaSuccess);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(done_.size(), 30u);
  for (size_t i = 0; i < done_.size(); ++i) EXPECT_EQ(done_[i], static_cast<int>(i % 3) + 1);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
}

TEST_F(EmulatedCudaGraphsTest, WhatIsForbiddenDuringACaptureSpoilsIt) {
  void* memory = nullptr;
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  const std::vector<std::pair<std::string, std::function<cudaError_t()>>> forbidden = {
      {"cudaMalloc", [&] { return cudaMalloc(&memory, 256); }},
      {"cudaFree", [&] { return cudaFree(&memory); }},
      {"cudaHostAlloc", [&] { return cudaHostAlloc(&memory, 256, 0); }},
      {"cudaFreeHost", [&] { return cudaFreeHost(&memory); }},
      {"cudaDeviceSynchronize", [] { return cudaDeviceSynchronize(); }},
      {"cudaStreamSynchronize", [&] { return cudaStreamSynchronize(stream_); }},
      {"cudaStreamSynchronize of another", [&] { return cudaStreamSynchronize(other_); }},
      {"cudaStreamQuery", [&] { return cudaStreamQuery(stream_); }},
      {"cudaEventQuery", [&] { return cudaEventQuery(event); }},
      {"cudaEventSynchronize", [&] { return cudaEventSynchronize(event); }},
  };
  for (const auto& [name, call] : forbidden) {
    SCOPED_TRACE(name);
    ASSERT_EQ(Begin(), cudaSuccess);
    EXPECT_EQ(Enqueue(1), cudaSuccess);
    EXPECT_EQ(call(), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(Enqueue(2), cudaErrorStreamCaptureInvalidated);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
    // The stream is as before.
    EXPECT_EQ(Enqueue(3), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(std::exchange(done_, {}), std::vector<int>{3});
  }
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
}

// But not ask for the stream that captures.
TEST_F(EmulatedCudaGraphsTest, OtherThreadsMayGoOn) {
  ASSERT_EQ(Begin(), cudaSuccess);
  ASSERT_EQ(Enqueue(1), cudaSuccess);
  std::thread([this] {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, 256), cudaSuccess);
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(other_), cudaSuccess);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureWrongThread);
  }).join();
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);

  ASSERT_EQ(Begin(), cudaSuccess);
  std::thread([this] {
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorStreamCaptureUnsupported);
  }).join();
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureInvalidated);
}

TEST_F(EmulatedCudaGraphsTest, RefusesWhatIsNoCapture) {
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorIllegalState);
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeThreadLocal),
            cudaErrorStreamCaptureUnsupported);
  ASSERT_EQ(Begin(), cudaSuccess);
  EXPECT_EQ(Begin(), cudaErrorIllegalState);
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaErrorInvalidValue);
  cudaGraphExec_t exec = nullptr;
  EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGraphLaunch(exec, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaErrorInvalidValue);
}

TEST_F(EmulatedCudaGraphsTest, AGraphThatHasNotRunMustLive) {
  ASSERT_EQ(Begin(), cudaSuccess);
  ASSERT_EQ(Enqueue(1), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  const cudaGraphExec_t exec = Instantiate(graph);
  ASSERT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
  EXPECT_DEATH((void)cudaGraphExecDestroy(exec), "before its stream had passed it");
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
}

TEST_F(EmulatedCudaGraphsTest, ACaptureThatFailsToEndIsOver) {
  FailEmulatedCall("cudaStreamEndCapture", cudaErrorMemoryAllocation);
  ASSERT_EQ(Begin(), cudaSuccess);
  ASSERT_EQ(Enqueue(1), cudaSuccess);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorMemoryAllocation);
  EXPECT_EQ(Enqueue(2), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(done_, std::vector<int>{2});
}

}  // namespace
}  // namespace expertmesh
