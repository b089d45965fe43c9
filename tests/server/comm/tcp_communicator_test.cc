#include "server/comm/tcp_communicator.h"

#include <dirent.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/comm/in_memory_rendezvous_store.h"
#include "tests/conformance/communicator_conformance.h"
#include "tests/server/comm/tcp_group.h"

namespace expertmesh {
namespace {

INSTANTIATE_TEST_SUITE_P(Tcp, CommunicatorConformance,
                         ::testing::ValuesIn(CommunicatorConformanceParams(
                             "tcp", [](int32_t ep_size) { return NewTcpGroup(ep_size); },
                             {CommunicatorDrive::kThreadPerRank,
                              CommunicatorDrive::kThreadedStreams})),
                         [](const auto& test) { return test.param.name; });

std::ptrdiff_t NumEntries(const char* directory) {
  DIR* const entries = opendir(directory);
  std::ptrdiff_t count = 0;
  while (readdir(entries) != nullptr) ++count;
  closedir(entries);
  return count;
}

TEST(TcpCommunicatorTest, LeavesNoDescriptorAndNoThread) {
  NewTcpGroup(3);
  const std::ptrdiff_t num_descriptors = NumEntries("/proc/self/fd");
  const std::ptrdiff_t num_threads = NumEntries("/proc/self/task");
  for (int cycle = 0; cycle < 100; ++cycle) {
    auto communicators = NewTcpGroup(3);
    std::vector<std::unique_ptr<Stream>> streams;
    CollectiveTag tag;
    tag.step = cycle;
    for (auto& communicator : communicators) {
      streams.push_back(NewInlineHostStream());
      ASSERT_TRUE(communicator->Barrier(tag, *streams.back()).ok());
    }
    for (auto& stream : streams) {
      ASSERT_TRUE(stream->Wait(absl::Now() + absl::Seconds(60)).ok());
    }
    if (cycle % 2 == 0) communicators[cycle % 3]->Abort(absl::InternalError("cycle"));
  }
  EXPECT_EQ(NumEntries("/proc/self/fd"), num_descriptors);
  EXPECT_EQ(NumEntries("/proc/self/task"), num_threads);
}

// A rank that has finished may go at once: the others finish too.
TEST(TcpCommunicatorTest, LeavingRightAfterAnOperation) {
  for (int round = 0; round < 30; ++round) {
    auto communicators = NewTcpGroup(3);
    const std::vector<std::byte> send(3 * 30000, std::byte{7});
    const std::vector<int64_t> bytes(3, 30000);
    std::vector<absl::Status> statuses(3);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        std::vector<std::byte> receive(send.size());
        AllToAllVParams params;
        params.send = send.data();
        params.send_bytes = bytes;
        params.receive = receive.data();
        params.receive_bytes = bytes;
        const auto stream = NewInlineHostStream();
        statuses[rank] = communicators[rank]->AllToAllV(params, *stream);
        statuses[rank].Update(stream->Wait(absl::Now() + absl::Seconds(60)));
        communicators[rank].reset();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : statuses) ASSERT_TRUE(status.ok()) << status;
  }
}

// The deadline is the communicator's own; the rank that never came learns it too.
TEST(TcpCommunicatorTest, OperationTimeout) {
  auto communicators = NewTcpGroup(3, absl::Milliseconds(50));
  const auto stream = NewInlineHostStream();
  CollectiveTag tag;
  tag.step = 17;
  ASSERT_TRUE(communicators[0]->Barrier(tag, *stream).ok());
  const absl::Status status = stream->Wait(absl::Now() + absl::Seconds(60));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()),
              ::testing::HasSubstr("rank 0 still waits for ranks 1, 2"));
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("step 17"));
  for (int rank : {1, 2}) {
    const auto other = NewInlineHostStream();
    absl::Status late = communicators[rank]->Barrier(tag, *other);
    late.Update(other->Wait(absl::Now() + absl::Seconds(60)));
    EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
  }
}

// Two lanes: an operation that was posted first is first on every rank, whichever stream gets to it
// first.
TEST(TcpCommunicatorTest, OrderOfPostingHoldsAcrossStreams) {
  auto communicators = NewTcpGroup(2);
  std::vector<std::unique_ptr<Stream>> first, second;
  Event gate;
  for (int rank = 0; rank < 2; ++rank) {
    first.push_back(NewThreadedHostStream());
    second.push_back(NewThreadedHostStream());
    CollectiveTag tag;
    // Rank 0's first lane is held up behind its second.
    if (rank == 0) {
      ASSERT_TRUE(first[rank]->WaitFor(gate).ok());
    }
    ASSERT_TRUE(communicators[rank]->Barrier(tag, *first[rank]).ok());
    tag.step = 1;
    ASSERT_TRUE(communicators[rank]->Barrier(tag, *second[rank]).ok());
  }
  EXPECT_EQ(second[0]->Wait(absl::Now() + absl::Milliseconds(20)).code(),
            absl::StatusCode::kDeadlineExceeded);
  gate.Signal();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(first[rank]->Wait(absl::Now() + absl::Seconds(60)).ok());
    EXPECT_TRUE(second[rank]->Wait(absl::Now() + absl::Seconds(60)).ok());
  }
}

TEST(TcpCommunicatorTest, AddressesThatCannotBe) {
  InMemoryRendezvousStore store;
  for (const char* address : {"0.0.0.0", "::", "localhost", "", "127.0.0.1:80"}) {
    TcpCommunicatorParams params = LoopbackTcpParams(0, 2, &store);
    params.mesh.bind_address = address;
    EXPECT_EQ(NewTcpCommunicator(params).status().code(), absl::StatusCode::kInvalidArgument)
        << address;
  }
  TcpCommunicatorParams params = LoopbackTcpParams(0, 2, &store);
  params.mesh.bind_address = "192.0.2.1";  // for documentation: no machine has it
  EXPECT_EQ(NewTcpCommunicator(params).status().code(), absl::StatusCode::kUnavailable);
}

TEST(TcpCommunicatorTest, OthersConnectToTheAdvertisedAddress) {
  InMemoryRendezvousStore store;
  std::vector<TcpCommunicatorParams> params = {LoopbackTcpParams(0, 2, &store),
                                               LoopbackTcpParams(1, 2, &store)};
  // Everything in 127.0.0.0/8 is this machine, and nobody listens there.
  params[0].mesh.advertise_address = "127.0.0.9";
  params[0].mesh.deadline = absl::Now() + absl::Seconds(1);
  const auto results = ConnectTcp(params);
  EXPECT_EQ(results[1].status().code(), absl::StatusCode::kUnavailable) << results[1].status();
  EXPECT_THAT(std::string(results[1].status().message()),
              ::testing::HasSubstr("rank 0 at 127.0.0.9:"));
  EXPECT_FALSE(results[0].ok());
  params[0].mesh.advertise_address = "0.0.0.0";
  EXPECT_EQ(NewTcpCommunicator(params[0]).status().code(), absl::StatusCode::kInvalidArgument);

  InMemoryRendezvousStore another;
  params = {LoopbackTcpParams(0, 2, &another), LoopbackTcpParams(1, 2, &another)};
  params[0].mesh.bind_address = "127.0.0.9";
  params[0].mesh.advertise_address = "127.0.0.9";
  for (const auto& result : ConnectTcp(params)) EXPECT_TRUE(result.ok()) << result.status();
}

TEST(TcpCommunicatorTest, Ipv6) {
  InMemoryRendezvousStore store;
  std::vector<TcpCommunicatorParams> params{LoopbackTcpParams(0, 2, &store),
                                            LoopbackTcpParams(1, 2, &store)};
  for (auto& one : params) one.mesh.bind_address = "::1";
  auto results = ConnectTcp(params);
  if (!results[0].ok() && results[0].status().code() == absl::StatusCode::kUnavailable &&
      absl::StrContains(results[0].status().message(), "listen")) {
    GTEST_SKIP() << "no IPv6 here: " << results[0].status();
  }
  for (const auto& result : results) EXPECT_TRUE(result.ok()) << result.status();
}

TEST(TcpCommunicatorTest, ARankThatDoesNotComeIsNamed) {
  InMemoryRendezvousStore store;
  TcpCommunicatorParams params = LoopbackTcpParams(0, 2, &store);
  params.mesh.deadline = absl::Now() + absl::Milliseconds(20);
  const absl::Status status = NewTcpCommunicator(params).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("rank 1"));
}

TEST(TcpCommunicatorTest, TwoRanksWithOneNumber) {
  InMemoryRendezvousStore store;
  auto results = ConnectTcp({LoopbackTcpParams(0, 2, &store), LoopbackTcpParams(1, 2, &store),
                             LoopbackTcpParams(1, 2, &store)});
  EXPECT_TRUE(results[0].ok()) << results[0].status();
  const int winner = results[1].ok() ? 1 : 2;
  EXPECT_TRUE(results[winner].ok()) << results[winner].status();
  EXPECT_EQ(results[3 - winner].status().code(), absl::StatusCode::kAlreadyExists);
}

// The peer has left its address and will never connect.
TEST(TcpCommunicatorTest, GivenUpWhileAPeerDoesNotConnect) {
  InMemoryRendezvousStore store;
  ASSERT_TRUE(
      store.Set(RendezvousKey(5, 6, "rank/1"), "127.0.0.1 1 00112233445566778899aabbccddeeff")
          .ok());
  std::atomic<bool> cancelled{false};
  TcpCommunicatorParams params = LoopbackTcpParams(0, 2, &store);
  params.mesh.deadline = absl::InfiniteFuture();
  params.mesh.cancelled = &cancelled;
  absl::Status status;
  std::thread thread([&] { status = NewTcpCommunicator(params).status(); });
  ASSERT_TRUE(store.Get(RendezvousKey(5, 6, "rank/0"), absl::Now() + absl::Seconds(60)).ok());
  cancelled = true;
  thread.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
}

TEST(TcpCommunicatorTest, AnEpochThatIsGivenUp) {
  InMemoryRendezvousStore store;
  absl::Status status;
  std::thread thread(
      [&] { status = NewTcpCommunicator(LoopbackTcpParams(0, 2, &store)).status(); });
  ASSERT_TRUE(store.Get(RendezvousKey(5, 6, "rank/0"), absl::Now() + absl::Seconds(60)).ok());
  Event removed;
  std::thread remover([&] {
    // The rank may not wait yet: then its Get comes after the removal, and needs another.
    while (!removed.done()) {
      store.RemovePrefix(RendezvousPrefix(5, 6));
      std::this_thread::yield();
    }
  });
  thread.join();
  removed.Signal();
  remover.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
}

}  // namespace
}  // namespace expertmesh
