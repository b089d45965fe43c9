#include "kernels/cuda/cuda_graph_cache.h"

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_status.h"
#include "tests/kernels/cuda/emulated_cuda_test.h"

namespace expertmesh {
namespace {

using testing::HasSubstr;

constexpr int64_t kMostGraphs = static_cast<int64_t>(CudaGraphCache::kMaxGraphs);
constexpr int kKernels = 5;

// A stream of the emulated device.
class TestStream {
 public:
  TestStream() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~TestStream() {
    EXPECT_EQ(cudaStreamSynchronize(stream_), expected_);
    EXPECT_EQ(cudaStreamDestroy(stream_), expected_);
  }
  void ExpectError(cudaError_t error) { expected_ = error; }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaError_t expected_ = cudaSuccess;
};

// Launches of kKernels kernels that append their key to `done`, once each.
class Launches {
 public:
  absl::Status Launch(CudaGraphCache& cache, uint64_t key, cudaStream_t stream) {
    return cache.Launch({key, 7}, stream, [&](cudaStream_t on) {
      ++num_calls_;
      for (int i = 0; i < kKernels; ++i) {
        const cudaError_t error = EnqueueEmulatedWork(on, [this, key] {
          done_.push_back(key);
          return cudaSuccess;
        });
        if (error != cudaSuccess) return CudaStatus(error, "a kernel", 0);
      }
      return also_ == nullptr ? absl::OkStatus() : also_();
    });
  }
  // What each call of the launch does besides.
  void Also(std::function<absl::Status()> also) { also_ = std::move(also); }
  void ExpectDone(const std::vector<uint64_t>& keys) const {
    std::vector<uint64_t> expected;
    for (const uint64_t key : keys) expected.insert(expected.end(), kKernels, key);
    EXPECT_EQ(done_, expected);
  }
  int num_calls() const { return num_calls_; }

 private:
  std::vector<uint64_t> done_;
  std::function<absl::Status()> also_;
  int num_calls_ = 0;
};

class CudaGraphCacheTest : public EmulatedCudaTest {
 protected:
  void Launch(uint64_t key) {
    const absl::Status status = launches_.Launch(*cache_, key, stream_.get());
    EXPECT_TRUE(status.ok()) << status;
  }
  // So far, on the device.
  // OK: none was told of.
  absl::Status FirstError() {
    absl::Status first;
    errors_->SetListener([&](const absl::Status& error) { first = error; });
    errors_->SetListener(nullptr);
    return first;
  }
  static int64_t GraphLaunches() { return CountEmulatedCuda().graph_launches; }
  static int64_t Captures() { return CountEmulatedCuda().Calls("cudaStreamBeginCapture"); }
  static int64_t Graphs() { return CountEmulatedCuda().graph_execs; }
  int64_t PlainLaunches() const { return launches_.num_calls() - Captures(); }
  void Wait() { EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess); }

  Launches launches_;
  TestStream stream_;
  const std::shared_ptr<CudaGraphErrors> errors_ = std::make_shared<CudaGraphErrors>();
  std::unique_ptr<CudaGraphCache> cache_ = std::make_unique<CudaGraphCache>(0, errors_);
};

TEST_F(CudaGraphCacheTest, CapturesWhatComesForTheSecondTime) {
  Launch(1);
  EXPECT_EQ(PlainLaunches(), 1);
  EXPECT_EQ(Captures(), 0);
  Launch(1);
  EXPECT_EQ(Captures(), 1);
  EXPECT_EQ(GraphLaunches(), 1);
  EXPECT_EQ(launches_.num_calls(), 2);
  Launch(2);
  for (int i = 0; i < 3; ++i) Launch(1);
  EXPECT_EQ(launches_.num_calls(), 3);
  EXPECT_EQ(PlainLaunches(), 2);
  EXPECT_EQ(GraphLaunches(), 4);
  EXPECT_EQ(Captures(), 1);
  Wait();
  launches_.ExpectDone({1, 1, 2, 1, 1, 1});
  EXPECT_TRUE(FirstError().ok()) << FirstError();
}

TEST_F(CudaGraphCacheTest, AGraphTakesTwoCallsOfTheRuntime) {
  const auto calls = [this](uint64_t key) {
    const int64_t before = CountEmulatedCuda().AllCalls();
    Launch(key);
    return CountEmulatedCuda().AllCalls() - before;
  };
  EXPECT_EQ(calls(1), kKernels);
  // Begin, kernels, end, event, instantiation, destruction of the template, launch, mark.
  EXPECT_EQ(calls(1), kKernels + 7);
  EXPECT_EQ(calls(1), 2);
}

TEST_F(CudaGraphCacheTest, KeepsTheGraphsThatWereUsedLast) {
  for (uint64_t key = 0; key < CudaGraphCache::kMaxGraphs; ++key) {
    Launch(key);
    Launch(key);
  }
  EXPECT_EQ(Graphs(), kMostGraphs);
  Launch(0);
  Wait();
  // Key 1 is the oldest now.
  Launch(1000);
  Launch(1000);
  EXPECT_EQ(Graphs(), kMostGraphs + 1);
  Launch(0);
  EXPECT_EQ(PlainLaunches(), kMostGraphs + 1);
  Launch(1);
  EXPECT_EQ(PlainLaunches(), kMostGraphs + 2);
  Wait();
  for (uint64_t key = 2000; key < 2100; ++key) {
    Launch(key);
    Launch(key);
    Wait();
    EXPECT_LE(Graphs(), kMostGraphs + 1);
  }
}

TEST_F(CudaGraphCacheTest, ForgetsWhatWasSeenOnceLongAgo) {
  Launch(0);
  for (uint64_t key = 1; key <= CudaGraphCache::kMaxSeen; ++key) Launch(key);
  Launch(0);
  EXPECT_EQ(Captures(), 0);
  Launch(0);
  EXPECT_EQ(Captures(), 1);
}

// The emulated device does nothing until it is asked, and aborts the test where a graph goes first.
TEST_F(CudaGraphCacheTest, AGraphLivesUntilTheDeviceHasPassedIt) {
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; key < CudaGraphCache::kMaxGraphs + 3; ++key) {
    for (int i = 0; i < 3; ++i) {
      Launch(key);
      keys.push_back(key);
    }
  }
  EXPECT_EQ(Graphs(), kMostGraphs + 3);
  Wait();
  launches_.ExpectDone(keys);
  Launch(5000);
  Launch(5000);
  // Those that had been evicted went; the one that was now waits for the next capture.
  EXPECT_EQ(Graphs(), kMostGraphs + 1);
  cache_ = nullptr;
  EXPECT_EQ(CountEmulatedCuda().graph_execs, 0);
  EXPECT_EQ(CountEmulatedCuda().events, 0);
}

TEST_F(CudaGraphCacheTest, TheCachesEndWaitsForItsGraphs) {
  for (int i = 0; i < 3; ++i) Launch(1);
  cache_ = nullptr;
  launches_.ExpectDone({1, 1, 1});
}

TEST_F(CudaGraphCacheTest, ALostDeviceEndsTheCacheToo) {
  for (int i = 0; i < 3; ++i) Launch(1);
  FailEmulatedWork(cudaErrorIllegalAddress, 2);
  EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaErrorIllegalAddress);
  const absl::Status status = launches_.Launch(*cache_, 1, stream_.get());
  EXPECT_THAT(std::string(status.message()), HasSubstr("the process must be restarted"));
  cache_ = nullptr;
  stream_.ExpectError(cudaErrorIllegalAddress);
}

// One by one, as if there were no graphs; the second error is told to nobody.
TEST_F(CudaGraphCacheTest, WithoutACaptureLaunchesGoOn) {
  for (const char* function : {"cudaStreamBeginCapture", "cudaStreamEndCapture",
                               "cudaEventCreateWithFlags", "cudaGraphInstantiate"}) {
    SCOPED_TRACE(function);
    const auto errors = std::make_shared<CudaGraphErrors>();
    int num_told = 0;
    errors->SetListener([&](const absl::Status& error) {
      ++num_told;
      EXPECT_EQ(error.code(), absl::StatusCode::kInternal);
      EXPECT_THAT(std::string(error.message()), HasSubstr(function));
    });
    Launches launches;
    const int64_t launches_before = GraphLaunches();
    {
      CudaGraphCache cache(0, errors);
      const auto launch = [&](uint64_t key) {
        const absl::Status status = launches.Launch(cache, key, stream_.get());
        EXPECT_TRUE(status.ok()) << status;
      };
      for (const uint64_t key : {1, 1, 2}) launch(key);
      FailEmulatedCall(function, cudaErrorNotSupported);
      for (const uint64_t key : {2, 2, 1, 3, 3, 3}) launch(key);
      EXPECT_EQ(Graphs(), 1);
      EXPECT_EQ(GraphLaunches() - launches_before, 2);
      EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }
    Wait();
    EXPECT_EQ(num_told, 1);
    errors->Add(absl::InternalError("another"));
    EXPECT_EQ(num_told, 1);
    launches.ExpectDone({1, 1, 2, 2, 2, 1, 3, 3, 3});
  }
}

TEST_F(CudaGraphCacheTest, WithoutMemoryItGivesUpGraphsAndTriesAgain) {
  constexpr uint64_t kNew = 100;
  constexpr int64_t kBefore = 6;
  for (const char* function : {"cudaStreamBeginCapture", "cudaStreamEndCapture",
                               "cudaEventCreateWithFlags", "cudaGraphInstantiate"}) {
    SCOPED_TRACE(function);
    CudaGraphCache cache(0, errors_);
    Launches launches;
    std::vector<uint64_t> keys;
    const auto launch = [&](uint64_t key) {
      const absl::Status status = launches.Launch(cache, key, stream_.get());
      EXPECT_TRUE(status.ok()) << status;
      keys.push_back(key);
    };
    for (uint64_t key = 0; key < kBefore; ++key) {
      for (int i = 0; i < 2; ++i) launch(key);
    }
    launch(kNew);
    FailEmulatedCall(function, cudaErrorMemoryAllocation);
    launch(kNew);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    // The device has to pass them first.
    EXPECT_EQ(Graphs(), kBefore);
    Wait();
    launch(kBefore - 1);
    EXPECT_EQ(Graphs(), kBefore / 2);
    for (int64_t i = 0; i < CudaGraphCache::kPauseLaunches; ++i) launch(kNew);
    EXPECT_EQ(Graphs(), kBefore / 2);
    for (int i = 0; i < 3; ++i) launch(kNew);
    EXPECT_EQ(Graphs(), kBefore / 2 + 1);
    Wait();
    launches.ExpectDone(keys);
  }
  EXPECT_TRUE(FirstError().ok()) << FirstError();
}

TEST_F(CudaGraphCacheTest, RetiredGraphsGoWhenNothingIsCapturedAnyMore) {
  for (int i = 0; i < 3; ++i) Launch(1);
  Launch(2);
  FailEmulatedCall("cudaGraphLaunch", cudaErrorNotSupported);
  Launch(1);
  EXPECT_EQ(CountEmulatedCuda().graph_execs, 1);
  Wait();
  Launch(2);
  EXPECT_EQ(CountEmulatedCuda().graph_execs, 0);
  EXPECT_EQ(CountEmulatedCuda().events, 0);
}

class CudaGraphCacheLossTest : public CudaGraphCacheTest,
                               public testing::WithParamInterface<const char*> {};

// Its steps tell of it, and not that there are no graphs.
TEST_P(CudaGraphCacheLossTest, ALostDeviceIsNoErrorOfGraphs) {
  Launch(1);
  FailEmulatedCall(GetParam(), cudaErrorIllegalAddress);
  const absl::Status status = launches_.Launch(*cache_, 1, stream_.get());
  EXPECT_THAT(std::string(status.message()), HasSubstr("the process must be restarted"));
  EXPECT_TRUE(FirstError().ok()) << FirstError();
  stream_.ExpectError(cudaErrorIllegalAddress);
}

INSTANTIATE_TEST_SUITE_P(Calls, CudaGraphCacheLossTest,
                         testing::Values("cudaStreamBeginCapture", "cudaStreamEndCapture",
                                         "cudaGraphInstantiate", "cudaGraphLaunch"));

TEST_F(CudaGraphCacheTest, WhatNoGraphMayHoldIsLaunchedWithoutOne) {
  launches_.Also([] {
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, 256);
    if (error == cudaSuccess) {
      EXPECT_EQ(cudaFree(memory), cudaSuccess);
    }
    return CudaStatus(error, "cudaMalloc", 0);
  });
  for (int i = 0; i < 4; ++i) Launch(1);
  EXPECT_EQ(Captures(), 1);
  EXPECT_EQ(Graphs(), 0);
  EXPECT_THAT(std::string(FirstError().message()), HasSubstr("cudaMalloc"));
  Wait();
  launches_.ExpectDone({1, 1, 1, 1});
}

TEST_F(CudaGraphCacheTest, AGraphThatCannotBeLaunchedIsLaunchedWithoutOne) {
  for (int i = 0; i < 3; ++i) Launch(1);
  FailEmulatedCall("cudaGraphLaunch", cudaErrorNotSupported);
  for (int i = 0; i < 3; ++i) Launch(1);
  EXPECT_EQ(GraphLaunches(), 2);
  EXPECT_THAT(std::string(FirstError().message()), HasSubstr("cudaGraphLaunch"));
  Wait();
  launches_.ExpectDone({1, 1, 1, 1, 1, 1});
}

TEST_F(CudaGraphCacheTest, AMarkThatFailsIsTheLaunchsError) {
  for (int i = 0; i < 2; ++i) Launch(1);
  FailEmulatedCall("cudaEventRecord", cudaErrorMemoryAllocation);
  const absl::Status status = launches_.Launch(*cache_, 1, stream_.get());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  launches_.ExpectDone({1, 1, 1});  // the device had to be waited for
  cache_ = nullptr;
}

TEST_F(CudaGraphCacheTest, ALaunchsOwnErrorIsItsOwn) {
  launches_.Also([] { return absl::InternalError("no such kernel"); });
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(launches_.Launch(*cache_, 1, stream_.get()).message(), "no such kernel");
  }
}

TEST_F(CudaGraphCacheTest, AListenerHearsOfWhatWasBeforeIt) {
  errors_->Add(absl::InternalError("early"));
  std::string heard;
  errors_->SetListener([&](const absl::Status& error) { heard = std::string(error.message()); });
  EXPECT_EQ(heard, "early");
}

// Two lanes: each with its own stream and arenas, so with its own keys.
TEST_F(CudaGraphCacheTest, StreamsShareTheCache) {
  constexpr int kRounds = 60;
  TestStream streams[2];
  Launches launches[2];
  std::vector<std::thread> lanes;
  for (uint64_t lane = 0; lane < 2; ++lane) {
    lanes.emplace_back([&, lane] {
      EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
      for (uint64_t i = 0; i < kRounds; ++i) {
        const absl::Status status =
            launches[lane].Launch(*cache_, 100 * lane + i % 6, streams[lane].get());
        EXPECT_TRUE(status.ok()) << status;
      }
      EXPECT_EQ(cudaStreamSynchronize(streams[lane].get()), cudaSuccess);
    });
  }
  for (std::thread& lane : lanes) lane.join();
  for (uint64_t lane = 0; lane < 2; ++lane) {
    std::vector<uint64_t> expected;
    for (uint64_t i = 0; i < kRounds; ++i) expected.push_back(100 * lane + i % 6);
    launches[lane].ExpectDone(expected);
  }
  EXPECT_TRUE(FirstError().ok()) << FirstError();
  EXPECT_GT(GraphLaunches(), 0);
}

}  // namespace
}  // namespace expertmesh
