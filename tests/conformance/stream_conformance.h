#ifndef EXPERTMESH_TESTS_CONFORMANCE_STREAM_CONFORMANCE_H_
#define EXPERTMESH_TESTS_CONFORMANCE_STREAM_CONFORMANCE_H_

// What every Stream must do. Include it in one test file per implementation and instantiate
// StreamConformance with a factory.

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "kernels/base/stream.h"

namespace expertmesh {

struct StreamKind {
  std::string name;
  std::function<std::unique_ptr<Stream>()> make;
};

class StreamConformance : public testing::TestWithParam<StreamKind> {
 protected:
  static absl::Time Soon() { return absl::Now() + absl::Seconds(30); }
  static absl::Time AtOnce() { return absl::Now(); }

  std::unique_ptr<Stream> stream_ = GetParam().make();
  std::vector<int> log_;  // touched by the stream's operations alone until Wait has returned

  void EnqueueLog(int entry) {
    ASSERT_TRUE(stream_
                    ->Enqueue([this, entry]() -> absl::Status {
                      log_.push_back(entry);
                      return absl::OkStatus();
                    })
                    .ok());
  }
};

TEST_P(StreamConformance, RunsInOrder) {
  std::vector<int> expected;
  for (int i = 0; i < 100; ++i) {
    EnqueueLog(i);
    expected.push_back(i);
  }
  ASSERT_TRUE(stream_->Wait(Soon()).ok());
  EXPECT_EQ(log_, expected);
}

TEST_P(StreamConformance, CopiesInOrder) {
  std::vector<char> source(1000, 'x');
  std::vector<char> target(1000, 'y');
  ASSERT_TRUE(stream_->Copy(target.data(), source.data(), 999).ok());
  ASSERT_TRUE(stream_->Copy(target.data() + 999, target.data(), 1).ok());
  ASSERT_TRUE(stream_->Copy(nullptr, nullptr, 0).ok());
  ASSERT_TRUE(stream_->Wait(Soon()).ok());
  EXPECT_EQ(target, source);
  EXPECT_EQ(stream_->Copy(target.data(), source.data(), -1).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(StreamConformance, KeepsTheFirstErrorAndDropsLaterWork) {
  const Event before, after;
  EnqueueLog(1);
  ASSERT_TRUE(stream_->Record(before).ok());
  ASSERT_TRUE(stream_->Enqueue([] { return absl::DataLossError("first"); }).ok());
  ASSERT_TRUE(stream_->Enqueue([] { return absl::InternalError("second"); }).ok());
  EnqueueLog(2);
  ASSERT_TRUE(stream_->Record(after).ok());
  EXPECT_EQ(stream_->Wait(Soon()), absl::DataLossError("first"));
  EXPECT_EQ(stream_->Wait(Soon()), absl::DataLossError("first"));
  EXPECT_EQ(log_, std::vector<int>{1});
  EXPECT_TRUE(before.Wait(Soon()).ok());
  EXPECT_EQ(after.Wait(Soon()), absl::DataLossError("first"));

  stream_->ClearError();
  EnqueueLog(3);
  EXPECT_TRUE(stream_->Wait(Soon()).ok());
  EXPECT_EQ(log_, (std::vector<int>{1, 3}));
}

TEST_P(StreamConformance, WaitsForAnEventOfTheHost) {
  Event event;
  EnqueueLog(1);
  ASSERT_TRUE(stream_->WaitFor(event).ok());
  EnqueueLog(2);
  const Event recorded;
  ASSERT_TRUE(stream_->Record(recorded).ok());
  EXPECT_EQ(stream_->Wait(AtOnce()).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(recorded.done());
  event.Signal();
  ASSERT_TRUE(stream_->Wait(Soon()).ok());
  EXPECT_TRUE(recorded.done());
  EXPECT_EQ(log_, (std::vector<int>{1, 2}));
}

TEST_P(StreamConformance, AnEventSignalledByAnotherThreadEndsAWait) {
  Event event;
  ASSERT_TRUE(stream_->WaitFor(event).ok());
  EnqueueLog(1);
  std::thread signaller([event]() mutable { event.Signal(); });
  EXPECT_TRUE(stream_->Wait(Soon()).ok());
  signaller.join();
  EXPECT_EQ(log_, std::vector<int>{1});
}

TEST_P(StreamConformance, AnEventsErrorBecomesTheStreams) {
  Event event;
  ASSERT_TRUE(stream_->WaitFor(event).ok());
  EnqueueLog(1);
  event.Signal(absl::AbortedError("epoch ended"));
  EXPECT_EQ(stream_->Wait(Soon()), absl::AbortedError("epoch ended"));
  EXPECT_TRUE(log_.empty());
}

// An event that nobody will signal any more must not hold up a stream that has failed.
TEST_P(StreamConformance, AFailedStreamSkipsWaits) {
  ASSERT_TRUE(stream_->Enqueue([] { return absl::DataLossError("failed"); }).ok());
  ASSERT_TRUE(stream_->WaitFor(Event()).ok());
  const Event recorded;
  ASSERT_TRUE(stream_->Record(recorded).ok());
  EXPECT_EQ(stream_->Wait(Soon()), absl::DataLossError("failed"));
  EXPECT_EQ(recorded.Wait(Soon()), absl::DataLossError("failed"));
}

TEST_P(StreamConformance, DestructionCancelsWhatHasNotStarted) {
  Event never;
  const Event recorded;
  ASSERT_TRUE(stream_->WaitFor(never).ok());
  EnqueueLog(1);
  ASSERT_TRUE(stream_->Record(recorded).ok());
  stream_.reset();
  EXPECT_EQ(recorded.Wait(Soon()).code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(log_.empty());
  never.Signal();  // after its waiter has gone
}

TEST_P(StreamConformance, TwoStreamsByEvents) {
  const std::unique_ptr<Stream> other = GetParam().make();
  Event gate;
  const Event mine, theirs;
  ASSERT_TRUE(stream_->WaitFor(gate).ok());
  EnqueueLog(1);
  ASSERT_TRUE(stream_->Record(mine).ok());
  ASSERT_TRUE(other->WaitFor(mine).ok());
  ASSERT_TRUE(other
                  ->Enqueue([this]() -> absl::Status {
                    log_.push_back(2);
                    return absl::OkStatus();
                  })
                  .ok());
  ASSERT_TRUE(other->Record(theirs).ok());
  ASSERT_TRUE(stream_->WaitFor(theirs).ok());
  EnqueueLog(3);
  gate.Signal();
  // An inline stream moves only inside its own operations, so drive both in turn.
  while (!stream_->Wait(absl::Now() + absl::Milliseconds(1)).ok()) {
    static_cast<void>(other->Wait(absl::Now() + absl::Milliseconds(1)));
  }
  ASSERT_TRUE(other->Wait(Soon()).ok());
  EXPECT_EQ(log_, (std::vector<int>{1, 2, 3}));
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_CONFORMANCE_STREAM_CONFORMANCE_H_
