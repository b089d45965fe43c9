#include "kernels/cuda/cuda_stream.h"

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_status.h"
#include "tests/kernels/cuda/cuda_stream_fixture.h"

namespace expertmesh {
namespace {

using testing::HasSubstr;

using CudaStreamTest = CudaStreamFixture;

TEST_F(CudaStreamTest, KnowsItsDevice) {
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  EXPECT_EQ(stream->device(), (Device{DeviceType::kCuda, 0}));
  EXPECT_EQ(AsCudaStream(*stream), stream.get());
  const std::unique_ptr<Stream> host = NewInlineHostStream();
  EXPECT_EQ(AsCudaStream(*host), nullptr);
}

TEST_F(CudaStreamTest, CopiesToTheDeviceAndBack) {
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  const Buffer device = allocator_.Allocate(1000).value();
  const Buffer host = pinned_.Allocate(1000).value();
  const std::vector<char> bytes(1000, 'x');
  ASSERT_TRUE(Copy(*stream, device, bytes).ok());
  ASSERT_TRUE(stream->Copy(host.data(), device.data(), 1000).ok());
  // Work waits for somebody to ask.
  EXPECT_EQ(host.data()[0], std::byte{0xff});
  ASSERT_TRUE(stream->Wait(Soon()).ok());
  EXPECT_EQ(std::memcmp(host.data(), bytes.data(), 1000), 0);
}

TEST_F(CudaStreamTest, TheHostMayNotTouchDeviceMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Buffer device = allocator_.Allocate(64).value();
  volatile std::byte* const data = device.data();
  EXPECT_DEATH((void)*data, "");
}

// Device work between two host functions, and device work behind one.
TEST_F(CudaStreamTest, HostWorkAndDeviceWorkKeepTheirOrder) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    const std::unique_ptr<CudaStream> stream = pool_.NewStream();
    const Buffer device = allocator_.Allocate(8).value();
    const Buffer host = pinned_.Allocate(8).value();
    std::vector<int> seen;
    for (int i = 0; i < 5; ++i) {
      ASSERT_TRUE(stream
                      ->Enqueue([&, i]() -> absl::Status {
                        std::memset(host.data(), i, 8);
                        return absl::OkStatus();
                      })
                      .ok());
      ASSERT_TRUE(stream->Copy(device.data(), host.data(), 8).ok());
      ASSERT_TRUE(stream
                      ->Launch([&](cudaStream_t cuda_stream) {
                        return CudaStatus(cudaMemsetAsync(device.data(), 100, 1, cuda_stream),
                                          "cudaMemsetAsync", 0);
                      })
                      .ok());
      ASSERT_TRUE(stream->Copy(host.data(), device.data(), 8).ok());
      ASSERT_TRUE(stream
                      ->Enqueue([&]() -> absl::Status {
                        seen.push_back(static_cast<int>(host.data()[0]));
                        seen.push_back(static_cast<int>(host.data()[7]));
                        return absl::OkStatus();
                      })
                      .ok());
    }
    ASSERT_TRUE(stream->Wait(Soon()).ok());
    EXPECT_EQ(seen, (std::vector<int>{100, 0, 100, 1, 100, 2, 100, 3, 100, 4}));
  }
}

TEST_F(CudaStreamTest, AFailedCallIsTheStreamsError) {
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  const Buffer device = allocator_.Allocate(4).value();
  const std::vector<char> bytes(4, 'y');
  FailEmulatedCall("cudaMemcpyAsync", cudaErrorInvalidValue);
  ASSERT_TRUE(Copy(*stream, device, bytes).ok());
  bool launched = false;
  ASSERT_TRUE(LaunchMark(*stream, &launched).ok());
  const absl::Status status = stream->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("cudaMemcpyAsync(4) on cuda:0: emulated (cudaErrorInvalidValue)"));
  EXPECT_FALSE(launched);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  stream->ClearError();
  ASSERT_TRUE(Copy(*stream, device, bytes).ok());
  EXPECT_TRUE(stream->Wait(Soon()).ok());
}

TEST_F(CudaStreamTest, ALostDeviceFailsEveryStream) {
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  const std::unique_ptr<CudaStream> other = pool_.NewStream();
  const Buffer device = allocator_.Allocate(4).value();
  const std::vector<char> bytes(4, 'y');
  FailEmulatedWork(cudaErrorIllegalAddress);
  ASSERT_TRUE(Copy(*stream, device, bytes).ok());
  const Event recorded;
  ASSERT_TRUE(stream->Record(recorded).ok());
  const absl::Status told = recorded.Wait(Soon());
  EXPECT_THAT(std::string(told.message()), HasSubstr("the process must be restarted"));
  EXPECT_EQ(stream->Wait(Soon()), told);
  ASSERT_TRUE(Copy(*other, device, bytes).ok());
  EXPECT_EQ(other->Wait(Soon()).code(), absl::StatusCode::kInternal);
  const std::unique_ptr<CudaStream> late = pool_.NewStream();
  EXPECT_EQ(late->Wait(Soon()).code(), absl::StatusCode::kInternal);
}

// Libraries ask for the last error after they have launched: it must be their own.
TEST_F(CudaStreamTest, PollingLeavesNoErrorBehind) {
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  const Buffer device = allocator_.Allocate(4).value();
  const std::vector<char> bytes(4, 'y');
  HangEmulatedDevice(true);
  ASSERT_TRUE(Copy(*stream, device, bytes).ok());
  EXPECT_EQ(stream->Wait(absl::Now() + absl::Milliseconds(1)).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  HangEmulatedDevice(false);
  EXPECT_TRUE(stream->Wait(Soon()).ok());
}

TEST_F(CudaStreamTest, ADeviceThatHangsIsWaitedForUntilTheDeadline) {
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  const Buffer device = allocator_.Allocate(4).value();
  const std::vector<char> bytes(4, 'y');
  HangEmulatedDevice(true);
  ASSERT_TRUE(Copy(*stream, device, bytes).ok());
  const Event recorded;
  ASSERT_TRUE(stream->Record(recorded).ok());
  EXPECT_EQ(stream->Wait(absl::Now() + absl::Milliseconds(5)).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(recorded.done());
  HangEmulatedDevice(false);
  EXPECT_TRUE(recorded.Wait(Soon()).ok());
}

// What the device was given may still write to its caller's memory.
TEST_F(CudaStreamTest, DestructionWaitsForTheDevice) {
  const Buffer device = allocator_.Allocate(4).value();
  const Buffer host = pinned_.Allocate(4).value();
  const std::vector<char> bytes(4, 'z');
  const Event never, recorded;
  {
    const std::unique_ptr<CudaStream> stream = pool_.NewStream();
    ASSERT_TRUE(Copy(*stream, device, bytes).ok());
    ASSERT_TRUE(stream->Copy(host.data(), device.data(), 4).ok());
    ASSERT_TRUE(stream->WaitFor(never).ok());
    ASSERT_TRUE(stream->Copy(host.data(), device.data(), 2).ok());
    ASSERT_TRUE(stream->Record(recorded).ok());
  }
  EXPECT_EQ(std::memcmp(host.data(), bytes.data(), 4), 0);
  EXPECT_EQ(recorded.Wait(Soon()).code(), absl::StatusCode::kCancelled);
}

TEST_F(CudaStreamTest, StreamsAreUsedAgain) {
  for (int i = 0; i < 10; ++i) {
    const std::unique_ptr<CudaStream> stream = pool_.NewStream();
    ASSERT_TRUE(stream->Enqueue([] { return absl::DataLossError("of its user alone"); }).ok());
    EXPECT_EQ(stream->Wait(Soon()).code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_EQ(CountEmulatedCuda().streams, 1);
}

TEST_F(CudaStreamTest, WithoutAStreamItsErrorSaysSo) {
  FailEmulatedCall("cudaStreamCreateWithFlags", cudaErrorMemoryAllocation);
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  ASSERT_TRUE(stream->Enqueue([] { return absl::OkStatus(); }).ok());
  EXPECT_EQ(stream->Wait(Soon()).code(), absl::StatusCode::kResourceExhausted);
  stream->ClearError();
  EXPECT_EQ(stream->Wait(Soon()).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(CudaStreamTest, ManyStreamsOnManyThreads) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([this, thread] {
      for (int i = 0; i < 20; ++i) {
        const std::unique_ptr<CudaStream> stream = pool_.NewStream();
        const Buffer device = allocator_.Allocate(100).value();
        const Buffer host = pinned_.Allocate(100).value();
        const std::vector<char> bytes(100, static_cast<char>(thread));
        Event gate;
        const Event done;
        ASSERT_TRUE(stream->WaitFor(gate).ok());
        ASSERT_TRUE(Copy(*stream, device, bytes).ok());
        ASSERT_TRUE(stream->Copy(host.data(), device.data(), 100).ok());
        ASSERT_TRUE(stream->Record(done).ok());
        gate.Signal();
        if (i % 2 == 0) {
          ASSERT_TRUE(stream->Wait(Soon()).ok());
        } else {
          ASSERT_TRUE(done.Wait(Soon()).ok());
        }
        ASSERT_EQ(std::memcmp(host.data(), bytes.data(), 100), 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace expertmesh
