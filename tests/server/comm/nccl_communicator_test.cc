#include "server/comm/nccl_communicator.h"

#include <dirent.h>

#include <cstddef>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/comm/in_process_communicator.h"
#include "tests/server/comm/fake_nccl_group.h"

namespace expertmesh {
namespace {

using Result = NcclFunctions::Result;

using NcclCommunicatorTest = FakeNcclGroupTest;

TEST_F(NcclCommunicatorTest, EqualBlocksTakeNcclsOwnCollectives) {
  auto ranks = group_.Connect(3);
  for (const absl::Status& status : Exchange(ranks)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(group_.nccl->num_all_to_alls(), 3);
  EXPECT_EQ(group_.nccl->num_sends(), 0);
  ranks.clear();
  EXPECT_EQ(group_.nccl->num_aborts(), 0) << "a whole group ends in peace";
  ExpectNothingLeft();
}

TEST_F(NcclCommunicatorTest, NothingToSendMakesNoCall) {
  auto ranks = group_.Connect(2);
  for (const absl::Status& status : Exchange(ranks, 0)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(group_.nccl->num_all_to_alls() + group_.nccl->num_sends(), 0);
}

TEST_F(NcclCommunicatorTest, AbortedGroupLeavesNothingBehind) {
  auto ranks = group_.Connect(3);
  group_.nccl->SetFaults(1, {.operations_hang = true});
  std::thread aborter([&] {
    // Once the operation hangs on the device or before.
    ranks[2]->Abort(absl::InternalError("why"));
  });
  // The others' parts may have come to an end.
  const absl::Status status = Exchange(ranks)[1];
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  aborter.join();
  ranks.clear();
  EXPECT_EQ(group_.num_stuck, 0);
  EXPECT_GE(group_.nccl->num_aborts(), 2);
  ExpectNothingLeft();
}

TEST_F(NcclCommunicatorTest, InitErrorOfOneRankFailsAll) {
  for (const bool late : {false, true}) {
    group_.nccl->SetFaults(1, {.init = Result::kSystemError, .init_late = late});
    const auto results = group_.TryConnect(3);
    EXPECT_EQ(results[1].status().code(), absl::StatusCode::kUnavailable) << results[1].status();
    for (const int rank : {0, 2}) {
      EXPECT_THAT(results[rank].status().code(),
                  ::testing::AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted))
          << results[rank].status();
    }
    ++group_.epoch;
    EXPECT_EQ(group_.nccl->num_live_comms(), 0);
    EXPECT_EQ(group_.nccl->num_live_streams(), 0);
  }
}

TEST_F(NcclCommunicatorTest, NoUniqueIdFailsAll) {
  group_.nccl->SetFaults(0, {.get_unique_id = Result::kSystemError});
  group_.init_timeout = absl::Milliseconds(50);
  const auto results = group_.TryConnect(2);
  EXPECT_EQ(results[0].status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(results[1].status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(NcclCommunicatorTest, InitThatNeverEndsHasADeadline) {
  group_.nccl->SetFaults(1, {.init_never_ends = true});
  group_.init_timeout = absl::Milliseconds(50);
  for (const auto& result : group_.TryConnect(2)) {
    // Whoever notices first; the other may hear of that before its own deadline.
    EXPECT_THAT(result.status().code(),
                ::testing::AnyOf(absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kAborted))
        << result.status();
  }
  EXPECT_EQ(group_.nccl->num_live_comms(), 0);
}

TEST_F(NcclCommunicatorTest, InitCanBeGivenUp) {
  group_.nccl->SetFaults(0, {.init_never_ends = true});
  group_.controls = NewInProcessCommunicators(1);
  absl::Status status;
  std::thread thread([&] { status = NewNcclCommunicator(group_.Params(0, 1)).status(); });
  group_.cancelled = true;
  thread.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
}

TEST_F(NcclCommunicatorTest, AnIdThatIsNoneIsRefused) {
  ASSERT_TRUE(group_.store.Set(RendezvousKey(5, 6, "nccl/unique_id"), "0badc0de").ok());
  group_.controls = NewInProcessCommunicators(2);
  EXPECT_EQ(NewNcclCommunicator(group_.Params(1, 2)).status().code(), absl::StatusCode::kDataLoss);
  // And an epoch is not formed twice.
  EXPECT_EQ(NewNcclCommunicator(group_.Params(0, 2)).status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST_F(NcclCommunicatorTest, BadParamsAreRefused) {
  group_.controls = NewInProcessCommunicators(2);
  NcclCommunicatorParams params = group_.Params(0, 2);
  params.ep_rank = 1;  // not control's
  EXPECT_EQ(NewNcclCommunicator(std::move(params)).status().code(),
            absl::StatusCode::kInvalidArgument);
  params = group_.Params(1, 2);
  params.on_stuck_abort = nullptr;
  EXPECT_EQ(NewNcclCommunicator(std::move(params)).status().code(),
            absl::StatusCode::kInvalidArgument);
  group_.controls = NewInProcessCommunicators(1);
  params = group_.Params(0, 1);
  params.device_index = 3;
  EXPECT_EQ(NewNcclCommunicator(std::move(params)).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(NcclCommunicatorTest, CallersDeviceStreamsAreMarkedInPlace) {
  group_.nccl->TreatCallersAsDeviceStreams();
  auto ranks = group_.Connect(2);
  for (int round = 0; round < 5; ++round) {
    for (const absl::Status& status : Exchange(ranks)) EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(group_.nccl->num_native_records(), 10);
  ranks.clear();
  EXPECT_EQ(group_.nccl->num_live_events(), 0);
}

std::ptrdiff_t NumThreads() {
  DIR* const entries = opendir("/proc/self/task");
  std::ptrdiff_t count = 0;
  while (readdir(entries) != nullptr) ++count;
  closedir(entries);
  return count;
}

TEST_F(NcclCommunicatorTest, LeavesNoThread) {
  group_.Connect(2);
  ++group_.epoch;
  const std::ptrdiff_t num_threads = NumThreads();
  for (int cycle = 0; cycle < 20; ++cycle) {
    auto ranks = group_.Connect(2);
    for (const absl::Status& status : Exchange(ranks)) EXPECT_TRUE(status.ok()) << status;
    if (cycle % 2 == 0) ranks[cycle % 4 / 2]->Abort(absl::InternalError("cycle"));
    ++group_.epoch;
  }
  EXPECT_EQ(NumThreads(), num_threads);
}

}  // namespace
}  // namespace expertmesh
