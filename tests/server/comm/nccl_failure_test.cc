// What a group of NCCL makes of errors, of peers that are lost and of calls that never end.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/comm/fake_nccl_group.h"

namespace expertmesh {
namespace {

using Result = NcclFunctions::Result;

using NcclFailureTest = FakeNcclGroupTest;

TEST_F(NcclFailureTest, ErrorsOfACallFailAllRanks) {
  auto ranks = group_.Connect(3);
  group_.nccl->SetFaults(1, {.group_end = Result::kInternalError});
  const auto statuses = Exchange(ranks);
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kInternal) << statuses[1];
  EXPECT_THAT(std::string(statuses[1].message()), ::testing::HasSubstr("fake NCCL error 3"));
  for (const int rank : {0, 2}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kAborted) << statuses[rank];
    EXPECT_THAT(std::string(statuses[rank].message()), ::testing::HasSubstr("fake NCCL error 3"));
  }
}

TEST_F(NcclFailureTest, AsynchronousErrorsFailAllRanks) {
  auto ranks = group_.Connect(3);
  group_.nccl->SetFaults(2, {.operations_hang = true, .async_error = Result::kRemoteError});
  const auto statuses = Exchange(ranks);
  EXPECT_EQ(statuses[2].code(), absl::StatusCode::kUnavailable) << statuses[2];
  for (const int rank : {0, 1}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kAborted) << statuses[rank];
  }
  // It stays broken, with the first error.
  const auto later = Exchange(ranks);
  EXPECT_EQ(later[2].code(), absl::StatusCode::kUnavailable) << later[2];
  EXPECT_EQ(ranks[2]->status(), later[2]);
}

TEST_F(NcclFailureTest, WhatNeverEndsHasADeadline) {
  for (const bool enqueued : {true, false}) {
    group_.nccl->SetFaults(1, {});
    group_.operation_timeout = absl::Milliseconds(30);
    auto ranks = group_.Connect(2);
    group_.nccl->SetFaults(1, {.operations_hang = enqueued, .enqueue_never_ends = !enqueued});
    // The other rank's parts may have come to an end.
    const absl::Status status = Exchange(ranks)[1];
    EXPECT_THAT(status.code(),
                ::testing::AnyOf(absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kAborted))
        << status;
    ++group_.epoch;
  }
}

// The thread that issues is no clock while it is inside a call.
TEST_F(NcclFailureTest, ACallThatDoesNotReturnHasADeadline) {
  group_.operation_timeout = absl::Seconds(1);
  group_.abort_timeout = absl::Seconds(5);
  for (const bool is_query : {false, true}) {
    group_.nccl = std::make_shared<FakeNccl>();
    auto ranks = group_.Connect(1);
    group_.nccl->SetFaults(0, {.call_hangs = !is_query});
    if (is_query) group_.nccl->HangQueries();
    const absl::Status status = Exchange(ranks)[0];
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr("it is in a call of NCCL or the device since"));
    EXPECT_EQ(group_.nccl->num_aborts(), 1);
    EXPECT_EQ(group_.num_stuck, 0) << "the abort ended it";
    ranks.clear();
    ExpectNothingLeft();
    EXPECT_EQ(group_.nccl->misuses(), "");
    ++group_.epoch;
  }
}

// Nobody looks whether the one before has ended: it is not the one to be named.
TEST_F(NcclFailureTest, WhatNcclDoesNotTakeIsNamed) {
  group_.operation_timeout = absl::Seconds(2);
  auto ranks = group_.Connect(1);
  group_.nccl->SetFaults(0, {.operations_hang = true});
  const std::vector<int64_t> counts = {8};
  std::vector<std::byte> buffers[4] = {std::vector<std::byte>(8), std::vector<std::byte>(8),
                                       std::vector<std::byte>(8), std::vector<std::byte>(8)};
  const std::unique_ptr<Stream> streams[] = {NewThreadedHostStream(), NewThreadedHostStream()};
  for (int i = 0; i < 2; ++i) {
    AllToAllVParams params;
    params.tag.step = 71 + i;
    params.send = buffers[2 * i].data();
    params.send_bytes = counts;
    params.receive = buffers[2 * i + 1].data();
    params.receive_bytes = counts;
    ASSERT_TRUE(ranks[0]->AllToAllV(params, *streams[i]).ok());
    const absl::Time deadline = Soon();
    while (group_.nccl->num_taken() == 0 && absl::Now() < deadline) std::this_thread::yield();
    group_.nccl->SetFaults(0, {.operations_hang = true, .enqueue_never_ends = true});
  }
  for (const auto& stream : streams) {
    const absl::Status status = stream->Wait(Soon());
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::ContainsRegex("rank 0: NCCL has not taken .* step 72 .* in time"));
  }
}

TEST_F(NcclFailureTest, ACallThatTheAbortDoesNotEndIsTold) {
  group_.operation_timeout = absl::Seconds(1);
  group_.abort_timeout = absl::Seconds(1);
  auto ranks = group_.Connect(1);
  group_.nccl->SetFaults(0, {.call_hangs = true, .call_survives_abort = true});
  const absl::Status status = Exchange(ranks)[0];
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(group_.num_stuck, 1);
  // The abort's thread may not have come to it within the second.
  const absl::Time deadline = Soon();
  while (group_.nccl->num_aborts() == 0 && absl::Now() < deadline) std::this_thread::yield();
  EXPECT_EQ(group_.nccl->num_aborts(), 1);
  group_.nccl->ReleaseAborts();
  ranks.clear();
}

// Pending operations must not end, nor Abort return, while the device may write into buffers.
TEST_F(NcclFailureTest, AbortThatHangsIsToldAfterItsDeadline) {
  group_.abort_timeout = absl::Seconds(1);
  auto ranks = group_.Connect(2);
  group_.nccl->SetFaults(1, {.operations_hang = true, .abort_hangs = true});
  const absl::Time begun = absl::Now();
  std::thread aborter([&] { ranks[1]->Abort(absl::InternalError("why")); });
  // The other rank's parts may have come to an end.
  const absl::Status status = Exchange(ranks)[1];
  aborter.join();
  EXPECT_GE(absl::Now() - begun, group_.abort_timeout);
  EXPECT_EQ(group_.num_stuck, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  ranks.clear();
}

TEST_F(NcclFailureTest, PendingOperationsWaitForTheAbort) {
  auto ranks = group_.Connect(1);
  group_.nccl->SetFaults(0, {.operations_hang = true, .abort_hangs = true});
  const std::vector<std::byte> send(8);
  std::vector<std::byte> receive(8);
  const std::vector<int64_t> counts = {8};
  const auto stream = NewThreadedHostStream();
  AllToAllVParams params;
  params.send = send.data();
  params.send_bytes = counts;
  params.receive = receive.data();
  params.receive_bytes = counts;
  ASSERT_TRUE(ranks[0]->AllToAllV(params, *stream).ok());
  Event passed;
  ASSERT_TRUE(stream->Record(passed).ok());
  // Must not wait: gRPC's thread calls it.
  ranks[0]->Break(absl::InternalError("why"));
  EXPECT_EQ(ranks[0]->status().code(), absl::StatusCode::kAborted) << "known at once";
  Event returned;
  std::thread aborter([&] {
    ranks[0]->Abort(absl::InternalError("again"));
    returned.Signal();
  });
  EXPECT_EQ(passed.Wait(absl::Now() + absl::Milliseconds(50)).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(returned.done());
  group_.nccl->ReleaseAborts();
  EXPECT_EQ(passed.Wait(Soon()).code(), absl::StatusCode::kAborted);
  aborter.join();
  EXPECT_EQ(group_.num_stuck, 0);
}

// A rank that leaves while NCCL moves bytes: nothing is left to agree on, but control knows.
TEST_F(NcclFailureTest, PeerLostDuringTheTransfer) {
  auto ranks = group_.Connect(3);
  group_.nccl->SetFaults(2, {.operations_hang = true});
  std::thread leaver;
  {
    const std::vector<int64_t> counts(3, 10);
    std::vector<std::vector<std::byte>> buffers(6, std::vector<std::byte>(30));
    std::vector<std::unique_ptr<Stream>> streams;
    for (int32_t rank = 0; rank < 3; ++rank) {
      streams.push_back(NewThreadedHostStream());
      AllToAllVParams params;
      params.send = buffers[rank].data();
      params.send_bytes = counts;
      params.receive = buffers[3 + rank].data();
      params.receive_bytes = counts;
      ASSERT_TRUE(ranks[rank]->AllToAllV(params, *streams[rank]).ok());
    }
    const absl::Time deadline = Soon();
    while (group_.nccl->num_all_to_alls() < 3 && absl::Now() < deadline) {
      std::this_thread::yield();
    }
    EXPECT_EQ(group_.nccl->num_all_to_alls(), 3);
    ranks[2].reset();
    for (int32_t rank = 0; rank < 3; ++rank) {
      const absl::Status status = streams[rank]->Wait(Soon());
      // The lost rank's parts of the others' operations may have been done.
      if (rank < 2 && status.ok()) continue;
      EXPECT_THAT(status.code(),
                  ::testing::AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted))
          << status;
    }
  }
}

TEST_F(NcclFailureTest, LastWordsThatNeverEndAreAborted) {
  auto ranks = group_.Connect(1);
  group_.nccl->SetFaults(0, {.finalize_never_ends = true});
  ranks.clear();
  EXPECT_EQ(group_.nccl->num_aborts(), 1);
  EXPECT_EQ(group_.nccl->num_live_comms(), 0);
}

}  // namespace
}  // namespace expertmesh
