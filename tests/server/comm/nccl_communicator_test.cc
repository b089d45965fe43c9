#include "server/comm/nccl_communicator.h"

#include <dirent.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/comm/in_memory_rendezvous_store.h"
#include "server/comm/in_process_communicator.h"
#include "server/comm/tcp_communicator.h"
#include "tests/conformance/communicator_conformance.h"
#include "tests/server/comm/fake_nccl.h"

namespace expertmesh {
namespace {

using Result = NcclFunctions::Result;

struct Group {
  std::shared_ptr<FakeNccl> nccl = std::make_shared<FakeNccl>();
  std::vector<std::unique_ptr<Communicator>> controls;
  InMemoryRendezvousStore store;
  absl::Duration operation_timeout = absl::Seconds(60);
  absl::Duration abort_timeout = absl::Seconds(60);
  absl::Duration init_timeout = absl::Seconds(60);
  std::atomic<bool> cancelled{false};
  std::atomic<int> num_stuck{0};
  uint64_t epoch = 6;

  NcclCommunicatorParams Params(int32_t rank, int32_t ep_size) {
    NcclCommunicatorParams params;
    params.ep_rank = rank;
    params.ep_size = ep_size;
    params.incarnation = 5;
    params.epoch = epoch;
    params.functions = nccl;
    params.control = std::move(controls[rank]);
    params.store = &store;
    params.deadline = absl::Now() + init_timeout;
    params.cancelled = &cancelled;
    params.operation_timeout = operation_timeout;
    params.abort_timeout = abort_timeout;
    params.on_stuck_abort = [this](const absl::Status&) { ++num_stuck; };
    return params;
  }

  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> TryConnect(int32_t ep_size) {
    if (controls.empty()) controls = NewInProcessCommunicators(ep_size);
    std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> results(ep_size);
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      threads.emplace_back(
          [&, rank] { results[rank] = NewNcclCommunicator(Params(rank, ep_size)); });
    }
    for (std::thread& thread : threads) thread.join();
    controls.clear();
    return results;
  }

  std::vector<std::unique_ptr<Communicator>> Connect(int32_t ep_size) {
    std::vector<std::unique_ptr<Communicator>> communicators;
    for (auto& result : TryConnect(ep_size)) {
      EXPECT_TRUE(result.ok()) << result.status();
      communicators.push_back(result.ok() ? *std::move(result) : nullptr);
    }
    return communicators;
  }
};

// Holds the communicator's group until it is gone.
class CheckedCommunicator : public Communicator {
 public:
  CheckedCommunicator(std::unique_ptr<Communicator> real, std::shared_ptr<FakeNccl> nccl)
      : real_(std::move(real)), nccl_(std::move(nccl)) {}
  ~CheckedCommunicator() override {
    real_.reset();
    EXPECT_EQ(nccl_->misuses(), "");
  }
  int32_t ep_rank() const override { return real_->ep_rank(); }
  int32_t ep_size() const override { return real_->ep_size(); }
  absl::Status AllToAllV(const AllToAllVParams& params, Stream& stream) override {
    return real_->AllToAllV(params, stream);
  }
  absl::Status AllGatherV(const AllGatherVParams& params, Stream& stream) override {
    return real_->AllGatherV(params, stream);
  }
  absl::Status Barrier(const CollectiveTag& tag, Stream& stream) override {
    return real_->Barrier(tag, stream);
  }
  void CloseOrder(int64_t order) override { real_->CloseOrder(order); }
  void Abort(const absl::Status& reason) override { real_->Abort(reason); }
  void Break(const absl::Status& reason) override { real_->Break(reason); }
  absl::Status status() const override { return real_->status(); }
  std::vector<int64_t> bytes_sent() const override { return real_->bytes_sent(); }
  std::vector<int64_t> wait_nanos() const override { return real_->wait_nanos(); }

 private:
  std::unique_ptr<Communicator> real_;
  const std::shared_ptr<FakeNccl> nccl_;
};

enum class Control : uint8_t { kInProcess, kTcp };

std::vector<std::unique_ptr<Communicator>> NewTcpGroup(int32_t ep_size) {
  InMemoryRendezvousStore store;
  std::vector<std::unique_ptr<Communicator>> communicators(ep_size);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    threads.emplace_back([&, rank] {
      TcpCommunicatorParams params;
      params.mesh.ep_rank = rank;
      params.mesh.ep_size = ep_size;
      params.mesh.bind_address = "127.0.0.1";
      params.mesh.store = &store;
      params.mesh.deadline = absl::Now() + absl::Seconds(60);
      params.operation_timeout = absl::Seconds(60);
      auto made = NewTcpCommunicator(params);
      EXPECT_TRUE(made.ok()) << made.status();
      communicators[rank] = *std::move(made);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return communicators;
}

auto Maker(Control control, bool has_all_to_all, bool device_streams) {
  return [=](int32_t ep_size) {
    Group group;
    group.nccl = std::make_shared<FakeNccl>(has_all_to_all);
    if (device_streams) group.nccl->TreatCallersAsDeviceStreams();
    group.controls =
        control == Control::kTcp ? NewTcpGroup(ep_size) : NewInProcessCommunicators(ep_size);
    std::vector<std::unique_ptr<Communicator>> checked;
    for (auto& communicator : group.Connect(ep_size)) {
      checked.push_back(std::make_unique<CheckedCommunicator>(std::move(communicator), group.nccl));
    }
    return checked;
  };
}

// Not the other drives: an operation moves on by the communicator's thread, not the caller's, and
// one caller's inline stream would wait for what another has to run.
const std::vector<CommunicatorDrive> kDrives = {CommunicatorDrive::kThreadedStreams};

INSTANTIATE_TEST_SUITE_P(Nccl, CommunicatorConformance,
                         ::testing::ValuesIn(CommunicatorConformanceParams(
                             "nccl", Maker(Control::kInProcess, true, false), kDrives)),
                         [](const auto& test) { return test.param.name; });
INSTANTIATE_TEST_SUITE_P(NcclOverTcp, CommunicatorConformance,
                         ::testing::ValuesIn(CommunicatorConformanceParams(
                             "nccl_tcp", Maker(Control::kTcp, false, false), kDrives)),
                         [](const auto& test) { return test.param.name; });
INSTANTIATE_TEST_SUITE_P(NcclDeviceStreams, CommunicatorConformance,
                         ::testing::ValuesIn(CommunicatorConformanceParams(
                             "nccl_device", Maker(Control::kInProcess, true, true), kDrives)),
                         [](const auto& test) { return test.param.name; });

class NcclCommunicatorTest : public ::testing::Test {
 protected:
  void TearDown() override {
    group_.nccl->ReleaseAborts();
    EXPECT_EQ(group_.nccl->misuses(), "");
  }

  static absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

  // One AllToAllV of all ranks; each rank's status.
  std::vector<absl::Status> Exchange(std::vector<std::unique_ptr<Communicator>>& ranks,
                                     int64_t num_bytes = 100) {
    const int32_t ep_size = ranks[0]->ep_size();
    const std::vector<int64_t> counts(ep_size, num_bytes);
    std::vector<std::vector<std::byte>> send(ep_size);
    std::vector<std::vector<std::byte>> receive(ep_size);
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<absl::Status> statuses(ep_size);
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      send[rank].resize(num_bytes * ep_size, std::byte(rank + 1));
      receive[rank].resize(num_bytes * ep_size);
      streams.push_back(NewThreadedHostStream());
      AllToAllVParams params;
      params.tag.step = step_;
      params.send = send[rank].data();
      params.send_bytes = counts;
      params.receive = receive[rank].data();
      params.receive_bytes = counts;
      statuses[rank] = ranks[rank]->AllToAllV(params, *streams[rank]);
    }
    ++step_;
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      statuses[rank].Update(streams[rank]->Wait(Soon()));
      if (!statuses[rank].ok()) continue;
      for (int32_t peer = 0; peer < ep_size && num_bytes > 0; ++peer) {
        EXPECT_EQ(receive[rank][peer * num_bytes], std::byte(peer + 1));
        EXPECT_EQ(receive[rank][(peer + 1) * num_bytes - 1], std::byte(peer + 1));
      }
    }
    return statuses;
  }

  Group group_;
  uint64_t step_ = 1;
};

TEST_F(NcclCommunicatorTest, EqualBlocksTakeNcclsOwnCollectives) {
  auto ranks = group_.Connect(3);
  for (const absl::Status& status : Exchange(ranks)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(group_.nccl->num_all_to_alls(), 3);
  EXPECT_EQ(group_.nccl->num_sends(), 0);
  ranks.clear();
  EXPECT_EQ(group_.nccl->num_aborts(), 0) << "a whole group ends in peace";
  EXPECT_EQ(group_.nccl->num_live_comms(), 0);
  EXPECT_EQ(group_.nccl->num_live_streams(), 0);
  EXPECT_EQ(group_.nccl->num_live_events(), 0);
}

TEST_F(NcclCommunicatorTest, NothingToSendMakesNoCall) {
  auto ranks = group_.Connect(2);
  for (const absl::Status& status : Exchange(ranks, 0)) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(group_.nccl->num_all_to_alls() + group_.nccl->num_sends(), 0);
}

TEST_F(NcclCommunicatorTest, AbortedGroupLeavesNothingBehind) {
  auto ranks = group_.Connect(3);
  FakeNccl::Faults faults;
  faults.operations_hang = true;
  group_.nccl->SetFaults(1, faults);
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
  EXPECT_EQ(group_.nccl->num_live_comms(), 0);
  EXPECT_EQ(group_.nccl->num_live_streams(), 0);
  EXPECT_EQ(group_.nccl->num_live_events(), 0);
}

TEST_F(NcclCommunicatorTest, InitErrorOfOneRankFailsAll) {
  for (const bool late : {false, true}) {
    FakeNccl::Faults faults;
    faults.init = Result::kSystemError;
    faults.init_late = late;
    group_.nccl->SetFaults(1, faults);
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
  FakeNccl::Faults faults;
  faults.get_unique_id = Result::kSystemError;
  group_.nccl->SetFaults(0, faults);
  group_.init_timeout = absl::Milliseconds(50);
  const auto results = group_.TryConnect(2);
  EXPECT_EQ(results[0].status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(results[1].status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(NcclCommunicatorTest, InitThatNeverEndsHasADeadline) {
  FakeNccl::Faults faults;
  faults.init_never_ends = true;
  group_.nccl->SetFaults(1, faults);
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
  FakeNccl::Faults faults;
  faults.init_never_ends = true;
  group_.nccl->SetFaults(0, faults);
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

TEST_F(NcclCommunicatorTest, ErrorsOfACallFailAllRanks) {
  auto ranks = group_.Connect(3);
  FakeNccl::Faults faults;
  faults.group_end = Result::kInternalError;
  group_.nccl->SetFaults(1, faults);
  const auto statuses = Exchange(ranks);
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kInternal) << statuses[1];
  EXPECT_THAT(std::string(statuses[1].message()), ::testing::HasSubstr("fake NCCL error 3"));
  for (const int rank : {0, 2}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kAborted) << statuses[rank];
    EXPECT_THAT(std::string(statuses[rank].message()), ::testing::HasSubstr("fake NCCL error 3"));
  }
}

TEST_F(NcclCommunicatorTest, AsynchronousErrorsFailAllRanks) {
  auto ranks = group_.Connect(3);
  FakeNccl::Faults hangs;
  hangs.operations_hang = true;
  hangs.async_error = Result::kRemoteError;
  group_.nccl->SetFaults(2, hangs);
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

TEST_F(NcclCommunicatorTest, WhatNeverEndsHasADeadline) {
  for (const bool enqueued : {true, false}) {
    group_.nccl->SetFaults(1, {});
    group_.operation_timeout = absl::Milliseconds(30);
    auto ranks = group_.Connect(2);
    FakeNccl::Faults faults;
    faults.operations_hang = enqueued;
    faults.enqueue_never_ends = !enqueued;
    group_.nccl->SetFaults(1, faults);
    // The other rank's parts may have come to an end.
    const absl::Status status = Exchange(ranks)[1];
    EXPECT_THAT(status.code(),
                ::testing::AnyOf(absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kAborted))
        << status;
    ++group_.epoch;
  }
}

// The thread that issues is no clock while it is inside a call.
TEST_F(NcclCommunicatorTest, ACallThatDoesNotReturnHasADeadline) {
  group_.operation_timeout = absl::Seconds(1);
  group_.abort_timeout = absl::Seconds(5);
  for (const bool is_query : {false, true}) {
    group_.nccl = std::make_shared<FakeNccl>();
    auto ranks = group_.Connect(1);
    FakeNccl::Faults faults;
    faults.call_hangs = !is_query;
    group_.nccl->SetFaults(0, faults);
    if (is_query) group_.nccl->HangQueries();
    const absl::Status status = Exchange(ranks)[0];
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr("it is in a call of NCCL or the device since"));
    EXPECT_EQ(group_.nccl->num_aborts(), 1);
    EXPECT_EQ(group_.num_stuck, 0) << "the abort ended it";
    ranks.clear();
    EXPECT_EQ(group_.nccl->num_live_comms(), 0);
    EXPECT_EQ(group_.nccl->num_live_streams(), 0);
    EXPECT_EQ(group_.nccl->num_live_events(), 0);
    EXPECT_EQ(group_.nccl->misuses(), "");
    ++group_.epoch;
  }
}

// Nobody looks whether the one before has ended: it is not the one to be named.
TEST_F(NcclCommunicatorTest, WhatNcclDoesNotTakeIsNamed) {
  group_.operation_timeout = absl::Seconds(2);
  auto ranks = group_.Connect(1);
  FakeNccl::Faults faults;
  faults.operations_hang = true;
  group_.nccl->SetFaults(0, faults);
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
    faults.enqueue_never_ends = true;
    group_.nccl->SetFaults(0, faults);
  }
  for (const auto& stream : streams) {
    const absl::Status status = stream->Wait(Soon());
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::ContainsRegex("rank 0: NCCL has not taken .* step 72 .* in time"));
  }
}

TEST_F(NcclCommunicatorTest, ACallThatTheAbortDoesNotEndIsTold) {
  group_.operation_timeout = absl::Seconds(1);
  group_.abort_timeout = absl::Seconds(1);
  auto ranks = group_.Connect(1);
  FakeNccl::Faults faults;
  faults.call_hangs = true;
  faults.call_survives_abort = true;
  group_.nccl->SetFaults(0, faults);
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
TEST_F(NcclCommunicatorTest, AbortThatHangsIsToldAfterItsDeadline) {
  group_.abort_timeout = absl::Seconds(1);
  auto ranks = group_.Connect(2);
  FakeNccl::Faults faults;
  faults.operations_hang = true;
  faults.abort_hangs = true;
  group_.nccl->SetFaults(1, faults);
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

TEST_F(NcclCommunicatorTest, PendingOperationsWaitForTheAbort) {
  auto ranks = group_.Connect(1);
  FakeNccl::Faults faults;
  faults.operations_hang = true;
  faults.abort_hangs = true;
  group_.nccl->SetFaults(0, faults);
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
TEST_F(NcclCommunicatorTest, PeerLostDuringTheTransfer) {
  auto ranks = group_.Connect(3);
  FakeNccl::Faults faults;
  faults.operations_hang = true;
  group_.nccl->SetFaults(2, faults);
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

TEST_F(NcclCommunicatorTest, LastWordsThatNeverEndAreAborted) {
  FakeNccl::Faults faults;
  faults.finalize_never_ends = true;
  auto ranks = group_.Connect(1);
  group_.nccl->SetFaults(0, faults);
  ranks.clear();
  EXPECT_EQ(group_.nccl->num_aborts(), 1);
  EXPECT_EQ(group_.nccl->num_live_comms(), 0);
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
