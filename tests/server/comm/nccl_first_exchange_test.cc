// What goes among the ranks before a communicator over NCCL stands.

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/comm/in_memory_rendezvous_store.h"
#include "server/comm/in_process_communicator.h"
#include "server/comm/nccl_communicator.h"
#include "tests/server/comm/fake_nccl.h"

namespace expertmesh {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using Result = NcclFunctions::Result;
using Results = std::vector<absl::StatusOr<std::unique_ptr<Communicator>>>;

class NcclFirstExchangeTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(nccl_->misuses(), "");
    EXPECT_EQ(nccl_->num_live_comms(), 0);
    EXPECT_EQ(nccl_->num_live_streams(), 0);
    EXPECT_EQ(nccl_->num_live_events(), 0);
    EXPECT_EQ(memory_.allocated_bytes(), 0);
  }

  Results Connect(int32_t ep_size) {
    InMemoryRendezvousStore store;
    auto controls = NewInProcessCommunicators(ep_size);
    Results results(ep_size);
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < ep_size; ++rank) {
      threads.emplace_back([&, rank] {
        NcclCommunicatorParams params;
        params.ep_rank = rank;
        params.ep_size = ep_size;
        params.functions = nccl_;
        params.control = std::move(controls[rank]);
        params.store = &store;
        params.allocator = &memory_;
        params.deadline = absl::Now() + timeout_;
        params.cancelled = &cancelled_;
        params.operation_timeout = operation_timeout_;
        params.abort_timeout = absl::Seconds(60);
        params.on_stuck_abort = [](const absl::Status& status) { ADD_FAILURE() << status; };
        results[rank] = NewNcclCommunicator(std::move(params));
      });
    }
    for (std::thread& thread : threads) thread.join();
    return results;
  }
  void SetFaults(int32_t rank, Result group_end, bool operations_hang) {
    FakeNccl::Faults faults;
    faults.group_end = group_end;
    faults.operations_hang = operations_hang;
    nccl_->SetFaults(rank, faults);
  }

  HostBufferPool memory_;
  std::shared_ptr<FakeNccl> nccl_ = std::make_shared<FakeNccl>();
  std::atomic<bool> cancelled_{false};
  absl::Duration timeout_ = absl::Seconds(60);
  absl::Duration operation_timeout_ = absl::Seconds(60);
};

TEST_F(NcclFirstExchangeTest, ItGoesEachWayBetweenAllRanks) {
  for (const bool has_all_to_all : {true, false}) {
    for (const int32_t ep_size : {1, 2, 3, 7}) {
      SCOPED_TRACE(ep_size);
      nccl_ = std::make_shared<FakeNccl>(has_all_to_all);
      const Results ranks = Connect(ep_size);
      for (const auto& rank : ranks) ASSERT_TRUE(rank.ok()) << rank.status();
      if (ep_size == 1) {
        EXPECT_EQ(nccl_->num_taken(), 0);
        continue;
      }
      EXPECT_EQ(nccl_->num_all_gathers(), ep_size);
      EXPECT_EQ(nccl_->num_all_to_alls(), has_all_to_all ? ep_size : 0);
      const int64_t num_pairs = ep_size * (ep_size - 1);
      EXPECT_EQ(nccl_->num_sends(), has_all_to_all ? num_pairs : num_pairs + ep_size * ep_size);
    }
  }
}

// Operations with places and without them come after it.
TEST_F(NcclFirstExchangeTest, OperationsFollow) {
  for (const bool have_places : {true, false}) {
    Results ranks = Connect(2);
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(ranks[rank].ok()) << ranks[rank].status();
      threads.emplace_back([&, rank] {
        Communicator& communicator = **ranks[rank];
        const auto stream = NewThreadedHostStream();
        const std::vector<int64_t> counts = {rank == 0 ? 0 : 3, rank == 0 ? 3 : 0};
        for (int64_t step = 0; step < 4; ++step) {
          const std::string send = "ab" + std::to_string(rank + 2 * step);
          std::string receive(3, ' ');
          AllToAllVParams params;
          params.tag.step = static_cast<uint64_t>(step);
          if (have_places) params.tag.order = step;
          params.send = reinterpret_cast<const std::byte*>(send.data());
          params.send_bytes = counts;
          params.receive = reinterpret_cast<std::byte*>(receive.data());
          params.receive_bytes = counts;
          absl::Status status = communicator.AllToAllV(params, *stream);
          if (have_places) communicator.CloseOrder(step);
          status.Update(stream->Wait(absl::Now() + absl::Seconds(60)));
          EXPECT_TRUE(status.ok()) << status;
          EXPECT_EQ(receive, "ab" + std::to_string(1 - rank + 2 * step));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_F(NcclFirstExchangeTest, AnErrorOfOneRankFailsAll) {
  SetFaults(1, Result::kSystemError, false);
  const Results ranks = Connect(3);
  EXPECT_EQ(ranks[1].status().code(), absl::StatusCode::kUnavailable) << ranks[1].status();
  EXPECT_THAT(std::string(ranks[1].status().message()), HasSubstr("connecting the ranks: "));
  // The others may hear of it before they have got as far.
  for (const auto& rank : ranks) {
    EXPECT_THAT(rank.status().code(),
                AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted))
        << rank.status();
    EXPECT_THAT(std::string(rank.status().message()), HasSubstr("fake NCCL error 2"));
  }
}

TEST_F(NcclFirstExchangeTest, WithoutMemoryNobodyWaits) {
  class NoMemory : public HostBufferPool {
    absl::StatusOr<Buffer> Allocate(int64_t /*size_bytes*/) override {
      return absl::ResourceExhaustedError("none left");
    }
  };
  NoMemory none;
  InMemoryRendezvousStore store;
  auto controls = NewInProcessCommunicators(2);
  Results ranks(2);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      NcclCommunicatorParams params;
      params.ep_rank = rank;
      params.ep_size = 2;
      params.functions = nccl_;
      params.control = std::move(controls[rank]);
      params.store = &store;
      params.allocator = rank == 0 ? &none : &memory_;
      params.deadline = absl::Now() + absl::Seconds(60);
      params.on_stuck_abort = [](const absl::Status& status) { ADD_FAILURE() << status; };
      ranks[rank] = NewNcclCommunicator(std::move(params));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ranks[0].status().code(), absl::StatusCode::kResourceExhausted) << ranks[0].status();
  EXPECT_EQ(ranks[1].status().code(), absl::StatusCode::kAborted) << ranks[1].status();
  EXPECT_THAT(std::string(ranks[1].status().message()), HasSubstr("none left"));
}

TEST_F(NcclFirstExchangeTest, RanksThatDoNotReachEachOtherHaveADeadline) {
  for (const bool of_the_epoch : {true, false}) {
    SetFaults(1, Result::kSuccess, true);
    (of_the_epoch ? timeout_ : operation_timeout_) = absl::Milliseconds(300);
    for (const auto& rank : Connect(2)) {
      // Whoever notices first tells the other, or has left before it came to the exchange.
      EXPECT_THAT(rank.status().code(),
                  AnyOf(absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kAborted,
                        absl::StatusCode::kUnavailable))
          << rank.status();
    }
    timeout_ = operation_timeout_ = absl::Seconds(60);
  }
}

TEST_F(NcclFirstExchangeTest, ItCanBeGivenUp) {
  SetFaults(0, Result::kSuccess, true);
  SetFaults(1, Result::kSuccess, true);
  Results ranks;
  std::thread connecting([&] { ranks = Connect(2); });
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (nccl_->num_taken() < 2 && absl::Now() < deadline) std::this_thread::yield();
  cancelled_ = true;
  connecting.join();
  for (const auto& rank : ranks) {
    EXPECT_THAT(rank.status().code(),
                AnyOf(absl::StatusCode::kCancelled, absl::StatusCode::kAborted))
        << rank.status();
  }
}

}  // namespace
}  // namespace expertmesh
