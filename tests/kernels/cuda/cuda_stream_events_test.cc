// Streams that wait for each other's events and for those of communicators, on the device where it
// can, and what anybody is told meanwhile.
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_device_point.h"
#include "kernels/cuda/cuda_event_pool.h"
#include "kernels/cuda/cuda_stream.h"
#include "tests/kernels/cuda/cuda_stream_fixture.h"

namespace expertmesh {
namespace {

using CudaStreamEventsTest = CudaStreamFixture;

// Nobody waits for the streams: the events' threads move them on.
TEST_F(CudaStreamEventsTest, StreamsMeetAtEvents) {
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
TEST_F(CudaStreamEventsTest, StreamsMeetOnTheDevice) {
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
TEST_F(CudaStreamEventsTest, AWaitMovesToTheDeviceOnceItsEventDoes) {
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
    const CudaEventPool::Shared reached = pool->Take().value();
    EXPECT_EQ(cudaEventRecord(reached.get(), stream), cudaSuccess);
    event.Place(std::make_shared<CudaDevicePoint>(0, reached.get(), reached));
  }
  Event event;
};

// The device has done everything; nobody is told so, and no host function runs, until the event
// that it passed is done.
TEST_F(CudaStreamEventsTest, NothingIsToldBeforeAnEventThatTheDevicePassedIsDone) {
  const auto events = NewCudaEventPool(0);
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
    ASSERT_TRUE(LaunchMark(*stream, &launched).ok());
    EXPECT_EQ(stream->Wait(Soon()), status);
    EXPECT_FALSE(launched);
    stream->ClearError();
    const Event later;
    ASSERT_TRUE(Copy(*stream, device, bytes).ok());
    ASSERT_TRUE(stream->Record(later).ok());
    EXPECT_TRUE(later.Wait(Soon()).ok()) << "the error is forgotten";
  }
}

TEST_F(CudaStreamEventsTest, TheFirstErrorWinsBesideAnEventThatIsNotDone) {
  const auto events = NewCudaEventPool(0);
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
TEST_F(CudaStreamEventsTest, APointOfAnotherDeviceIsNotWaitedFor) {
  const auto events = NewCudaEventPool(0);
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  Event event;
  event.Place(std::make_shared<CudaDevicePoint>(1, nullptr, nullptr));
  bool launched = false;
  ASSERT_TRUE(stream->WaitFor(event).ok());
  ASSERT_TRUE(LaunchMark(*stream, &launched).ok());
  EXPECT_FALSE(launched);
  event.Signal();
  EXPECT_TRUE(stream->Wait(Soon()).ok());
  EXPECT_TRUE(launched);
}

// Nobody can say of what was recorded behind such an event that it went well.
TEST_F(CudaStreamEventsTest, DestructionDoesNotWaitForAnEventThatTheDevicePassed) {
  const auto events = NewCudaEventPool(0);
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

}  // namespace
}  // namespace expertmesh
