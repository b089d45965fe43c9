#include "kernels/cuda/cuda_stream.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_allocator.h"
#include "kernels/cuda/cuda_device_point.h"
#include "kernels/cuda/cuda_event_pool.h"
#include "kernels/cuda/cuda_status.h"
#include "tests/kernels/cuda/emulated_cuda_test.h"

namespace expertmesh {
namespace {

using testing::HasSubstr;

class CudaStreamTest : public EmulatedCudaTest {
 protected:
  static absl::Time Soon() { return absl::Now() + absl::Seconds(30); }
  static absl::Status Copy(Stream& stream, const Buffer& buffer, const std::vector<char>& bytes) {
    return stream.Copy(buffer.data(), bytes.data(), static_cast<int64_t>(bytes.size()));
  }

  CudaAllocator allocator_{CudaMemory::kDevice, 0};
  CudaAllocator pinned_{CudaMemory::kPinnedHost, 0};
  CudaStreamPool pool_{0};
};

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

// Nobody waits for the streams: the events' threads move them on.
TEST_F(CudaStreamTest, StreamsMeetAtEvents) {
  const std::unique_ptr<CudaStream> first = pool_.NewStream();
  const std::unique_ptr<CudaStream> second = pool_.NewStream();
  const Buffer device = allocator_.Allocate(4).value();
  const Buffer host = pinned_.Allocate(4).value();
  const std::vector<char> bytes(4, 'y');
  ASSERT_TRUE(Copy(*first, device, bytes).ok());
  const Event copied, done;
  ASSERT_TRUE(first->Record(copied).ok());
  ASSERT_TRUE(second->WaitFor(copied).ok());
  ASSERT_TRUE(second->Copy(host.data(), device.data(), 4).ok());
  ASSERT_TRUE(second->Record(done).ok());
  EXPECT_TRUE(done.Wait(Soon()).ok());
  EXPECT_EQ(std::memcmp(host.data(), bytes.data(), 4), 0);
}

// The device hangs, so nothing that the host learns of it can be what lets the work through.
TEST_F(CudaStreamTest, StreamsMeetOnTheDevice) {
  const std::unique_ptr<CudaStream> first = pool_.NewStream();
  const std::unique_ptr<CudaStream> second = pool_.NewStream();
  const Buffer device = allocator_.Allocate(4).value();
  const Buffer host = pinned_.Allocate(4).value();
  const std::vector<char> bytes(4, 'y');
  const Event copied, back, done;
  HangEmulatedDevice(true);
  const int64_t num_copies = CountEmulatedCuda().copies;
  ASSERT_TRUE(Copy(*first, device, bytes).ok());
  ASSERT_TRUE(first->Record(copied).ok());
  ASSERT_TRUE(second->WaitFor(copied).ok());
  ASSERT_TRUE(second->Copy(host.data(), device.data(), 4).ok());
  ASSERT_TRUE(second->Record(back).ok());
  ASSERT_TRUE(first->WaitFor(back).ok());
  ASSERT_TRUE(first->Copy(device.data(), host.data(), 4).ok());
  ASSERT_TRUE(first->Record(done).ok());
  // A thread that polls meanwhile may be who launches them.
  const absl::Time deadline = Soon();
  while (CountEmulatedCuda().copies < num_copies + 3 && absl::Now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(CountEmulatedCuda().copies, num_copies + 3);
  EXPECT_FALSE(done.done());
  HangEmulatedDevice(false);
  EXPECT_TRUE(first->Wait(Soon()).ok());
  EXPECT_TRUE(done.Wait(Soon()).ok());
  EXPECT_EQ(std::memcmp(host.data(), bytes.data(), 4), 0);
  EXPECT_TRUE(second->Wait(Soon()).ok());
}

// Whoever waits for an event that is not placed yet goes on when it is.
TEST_F(CudaStreamTest, AWaitMovesToTheDeviceOnceItsEventDoes) {
  const std::unique_ptr<CudaStream> first = pool_.NewStream();
  const std::unique_ptr<CudaStream> second = pool_.NewStream();
  const Buffer device = allocator_.Allocate(4).value();
  const Buffer host = pinned_.Allocate(4).value();
  const std::vector<char> bytes(4, 'y');
  HangEmulatedDevice(true);
  Event gate;
  const Event copied, launched;
  ASSERT_TRUE(second->WaitFor(copied).ok());
  ASSERT_TRUE(second
                  ->Launch([launched = launched](cudaStream_t) mutable {
                    launched.Signal();
                    return absl::OkStatus();
                  })
                  .ok());
  ASSERT_TRUE(second->Copy(host.data(), device.data(), 4).ok());
  ASSERT_TRUE(first->WaitFor(gate).ok());
  ASSERT_TRUE(Copy(*first, device, bytes).ok());
  ASSERT_TRUE(first->Record(copied).ok());
  EXPECT_FALSE(launched.done());
  gate.Signal();
  EXPECT_TRUE(launched.Wait(Soon()).ok());
  EXPECT_FALSE(copied.done());
  HangEmulatedDevice(false);
  EXPECT_TRUE(second->Wait(Soon()).ok());
  EXPECT_TRUE(copied.done());
  EXPECT_EQ(std::memcmp(host.data(), bytes.data(), 4), 0);
}

// What a communicator's event is: the device passes its point, and then it is told.
struct PlacedEvent {
  explicit PlacedEvent(const std::shared_ptr<CudaEventPool>& pool, cudaStream_t stream) {
    const CudaEventPool::SharedEvent reached = pool->Take().value();
    EXPECT_EQ(cudaEventRecord(reached.get(), stream), cudaSuccess);
    event.Place(std::make_shared<CudaDevicePoint>(0, reached.get(), reached));
  }
  Event event;
};

// The device has done everything; nobody is told so, and no host function runs, until the event
// that it passed is done.
TEST_F(CudaStreamTest, NothingIsToldBeforeAnEventThatTheDevicePassedIsDone) {
  const auto events = std::make_shared<CudaEventPool>(0);
  const std::unique_ptr<CudaStream> other = pool_.NewStream();
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails);
    const std::unique_ptr<CudaStream> stream = pool_.NewStream();
    const std::unique_ptr<CudaStream> third = pool_.NewStream();
    const Buffer device = allocator_.Allocate(4).value();
    const Buffer host = pinned_.Allocate(4).value();
    std::memset(host.data(), 0, 4);
    const std::vector<char> bytes(4, 'y');
    PlacedEvent placed(events, other->cuda_stream());
    const Event before, after, of_third;
    std::atomic<bool> worked{false};
    ASSERT_TRUE(stream->Record(before).ok());
    ASSERT_TRUE(stream->WaitFor(placed.event).ok());
    ASSERT_TRUE(Copy(*stream, device, bytes).ok());
    ASSERT_TRUE(stream->Copy(host.data(), device.data(), 4).ok());
    ASSERT_TRUE(stream->Record(after).ok());
    ASSERT_TRUE(third->WaitFor(after).ok());
    ASSERT_TRUE(third->Record(of_third).ok());
    ASSERT_TRUE(stream
                    ->Enqueue([&] {
                      worked = true;
                      return absl::OkStatus();
                    })
                    .ok());
    EXPECT_TRUE(before.Wait(Soon()).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(std::memcmp(host.data(), bytes.data(), 4), 0) << "the device ran on";
    for (Stream* const each : {stream.get(), third.get()}) {
      EXPECT_EQ(each->Wait(absl::Now() + absl::Milliseconds(5)).code(),
                absl::StatusCode::kDeadlineExceeded);
    }
    EXPECT_FALSE(after.done());
    EXPECT_FALSE(of_third.done());
    EXPECT_FALSE(worked);
    const absl::Status status = fails ? absl::AbortedError("the epoch ended") : absl::OkStatus();
    placed.event.Signal(status);
    EXPECT_EQ(stream->Wait(Soon()), status);
    EXPECT_EQ(third->Wait(Soon()), status);
    EXPECT_EQ(after.Wait(Soon()), status);
    EXPECT_EQ(of_third.Wait(Soon()), status);
    EXPECT_EQ(worked, !fails);
    if (!fails) continue;
    bool launched = false;
    ASSERT_TRUE(stream
                    ->Launch([&](cudaStream_t) {
                      launched = true;
                      return absl::OkStatus();
                    })
                    .ok());
    EXPECT_EQ(stream->Wait(Soon()), status);
    EXPECT_FALSE(launched);
    stream->ClearError();
    const Event later;
    ASSERT_TRUE(Copy(*stream, device, bytes).ok());
    ASSERT_TRUE(stream->Record(later).ok());
    EXPECT_TRUE(later.Wait(Soon()).ok()) << "the error is forgotten";
  }
}

TEST_F(CudaStreamTest, TheFirstErrorWinsBesideAnEventThatIsNotDone) {
  const auto events = std::make_shared<CudaEventPool>(0);
  const std::unique_ptr<CudaStream> other = pool_.NewStream();
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  PlacedEvent placed(events, other->cuda_stream());
  const Event between, after;
  ASSERT_TRUE(stream->WaitFor(placed.event).ok());
  ASSERT_TRUE(stream->Record(between).ok());
  ASSERT_TRUE(stream->Launch([](cudaStream_t) { return absl::DataLossError("a launch"); }).ok());
  ASSERT_TRUE(stream->Record(after).ok());
  placed.event.Signal(absl::AbortedError("the epoch ended"));
  EXPECT_EQ(stream->Wait(Soon()), absl::DataLossError("a launch"));
  EXPECT_EQ(between.Wait(Soon()), absl::AbortedError("the epoch ended"));
  EXPECT_EQ(after.Wait(Soon()), absl::DataLossError("a launch"));
  EXPECT_TRUE(other->Wait(Soon()).ok());
}

// Another device's stream learns of it from the host.
TEST_F(CudaStreamTest, APointOfAnotherDeviceIsNotWaitedFor) {
  const auto events = std::make_shared<CudaEventPool>(0);
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  Event event;
  event.Place(std::make_shared<CudaDevicePoint>(1, nullptr, nullptr));
  bool launched = false;
  ASSERT_TRUE(stream->WaitFor(event).ok());
  ASSERT_TRUE(stream
                  ->Launch([&](cudaStream_t) {
                    launched = true;
                    return absl::OkStatus();
                  })
                  .ok());
  EXPECT_FALSE(launched);
  event.Signal();
  EXPECT_TRUE(stream->Wait(Soon()).ok());
  EXPECT_TRUE(launched);
}

TEST_F(CudaStreamTest, AFailedCallIsTheStreamsError) {
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  const Buffer device = allocator_.Allocate(4).value();
  const std::vector<char> bytes(4, 'y');
  FailEmulatedCall("cudaMemcpyAsync", cudaErrorInvalidValue);
  ASSERT_TRUE(Copy(*stream, device, bytes).ok());
  bool launched = false;
  ASSERT_TRUE(stream
                  ->Launch([&](cudaStream_t) {
                    launched = true;
                    return absl::OkStatus();
                  })
                  .ok());
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

// Nobody can say of what was recorded behind such an event that it went well.
TEST_F(CudaStreamTest, DestructionDoesNotWaitForAnEventThatTheDevicePassed) {
  const auto events = std::make_shared<CudaEventPool>(0);
  const std::unique_ptr<CudaStream> other = pool_.NewStream();
  const Buffer device = allocator_.Allocate(4).value();
  const Buffer host = pinned_.Allocate(4).value();
  const std::vector<char> bytes(4, 'z');
  PlacedEvent placed(events, other->cuda_stream());
  const Event recorded;
  {
    const std::unique_ptr<CudaStream> stream = pool_.NewStream();
    ASSERT_TRUE(stream->WaitFor(placed.event).ok());
    ASSERT_TRUE(Copy(*stream, device, bytes).ok());
    ASSERT_TRUE(stream->Copy(host.data(), device.data(), 4).ok());
    ASSERT_TRUE(stream->Record(recorded).ok());
  }
  EXPECT_EQ(std::memcmp(host.data(), bytes.data(), 4), 0);
  EXPECT_EQ(recorded.Wait(Soon()).code(), absl::StatusCode::kCancelled);
  placed.event.Signal();
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
