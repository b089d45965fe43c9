#include "kernels/base/stream.h"

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/conformance/stream_conformance.h"
#include "tests/kernels/base/fake_device.h"

namespace expertmesh {
namespace {

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }
absl::Time AtOnce() { return absl::Now(); }

FakeDevice& TheFakeDevice() {
  static FakeDevice* const device = new FakeDevice();
  return *device;
}

INSTANTIATE_TEST_SUITE_P(
    All, StreamConformance,
    testing::Values(StreamKind{"Inline", NewInlineHostStream},
                    StreamKind{"Threaded", NewThreadedHostStream},
                    StreamKind{"FakeDevice", [] { return TheFakeDevice().NewStream(); }}),
    [](const testing::TestParamInfo<StreamKind>& kind) { return kind.param.name; });

TEST(InlineHostStreamTest, RunsOnTheCallerAtOnce) {
  const std::unique_ptr<Stream> stream = NewInlineHostStream();
  std::thread::id ran_on;
  ASSERT_TRUE(stream
                  ->Enqueue([&ran_on]() -> absl::Status {
                    ran_on = std::this_thread::get_id();
                    return absl::OkStatus();
                  })
                  .ok());
  EXPECT_EQ(ran_on, std::this_thread::get_id());
}

TEST(InlineHostStreamTest, WorkBehindAnEventRunsInTheNextOperation) {
  const std::unique_ptr<Stream> stream = NewInlineHostStream();
  Event event;
  int count = 0;
  const auto add = [&count]() -> absl::Status {
    ++count;
    return absl::OkStatus();
  };
  ASSERT_TRUE(stream->WaitFor(event).ok());
  ASSERT_TRUE(stream->Enqueue(add).ok());
  EXPECT_EQ(count, 0);
  event.Signal();
  EXPECT_EQ(count, 0);
  ASSERT_TRUE(stream->Enqueue(add).ok());
  EXPECT_EQ(count, 2);
}

TEST(InlineHostStreamTest, WorkMayEnqueueMore) {
  const std::unique_ptr<Stream> stream = NewInlineHostStream();
  std::vector<int> log;
  ASSERT_TRUE(stream
                  ->Enqueue([&]() -> absl::Status {
                    const absl::Status status = stream->Enqueue([&log]() -> absl::Status {
                      log.push_back(2);
                      return absl::OkStatus();
                    });
                    log.push_back(1);
                    return status;
                  })
                  .ok());
  EXPECT_EQ(log, (std::vector<int>{1, 2}));
}

TEST(ThreadedHostStreamTest, RunningWorkOutlastsADeadline) {
  const std::unique_ptr<Stream> stream = NewThreadedHostStream();
  const Event gate;
  bool ran = false;
  ASSERT_TRUE(stream
                  ->Enqueue([&]() -> absl::Status {
                    const absl::Status status = gate.Wait(Soon());
                    ran = true;
                    return status;
                  })
                  .ok());
  EXPECT_EQ(stream->Wait(absl::Now() + absl::Milliseconds(5)).code(),
            absl::StatusCode::kDeadlineExceeded);
  Event(gate).Signal();
  EXPECT_TRUE(stream->Wait(Soon()).ok());
  EXPECT_TRUE(ran);
}

TEST(EventTest, FirstSignalWins) {
  Event event;
  EXPECT_FALSE(event.done());
  EXPECT_EQ(event.Wait(AtOnce()).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(event.status().ok());
  event.Signal(absl::UnknownError("one"));
  event.Signal(absl::UnknownError("two"));
  EXPECT_TRUE(event.done());
  EXPECT_EQ(event.Wait(absl::InfiniteFuture()), absl::UnknownError("one"));
  EXPECT_EQ(event.status(), absl::UnknownError("one"));
}

TEST(EventTest, CallbacksRunOnce) {
  Event event;
  int calls = 0;
  event.OnDone([&calls] { ++calls; });
  EXPECT_EQ(calls, 0);
  event.Signal();
  EXPECT_EQ(calls, 1);
  event.Signal();
  EXPECT_EQ(calls, 1);
  event.OnDone([&calls] { ++calls; });
  EXPECT_EQ(calls, 2);
}

TEST(EventTest, IsPlacedOnceAndUntilItIsDone) {
  Event event;
  int calls = 0;
  event.OnPlaced([&calls] { ++calls; });
  event.Place(nullptr);
  EXPECT_EQ(calls, 0);
  const auto point = std::make_shared<DevicePoint>(Device{});
  event.Place(point);
  event.Place(std::make_shared<DevicePoint>(Device{}));
  EXPECT_EQ(event.point(), point);
  EXPECT_FALSE(event.done());
  EXPECT_EQ(calls, 1);
  event.OnPlaced([&calls] { ++calls; });
  EXPECT_EQ(calls, 2);
  event.Signal(absl::UnknownError("why"));
  EXPECT_EQ(event.point(), nullptr);
  EXPECT_EQ(point.use_count(), 1);
  EXPECT_EQ(event.status(), absl::UnknownError("why"));
  EXPECT_EQ(calls, 2);
}

TEST(EventTest, WhatIsDoneIsNotPlaced) {
  Event event;
  int calls = 0;
  event.OnPlaced([&calls] { ++calls; });
  event.Signal();
  EXPECT_EQ(calls, 1);
  event.Place(std::make_shared<DevicePoint>(Device{}));
  EXPECT_EQ(event.point(), nullptr);
  event.OnPlaced([&calls] { ++calls; });
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace expertmesh
