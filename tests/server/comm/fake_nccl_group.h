#ifndef EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_GROUP_H_
#define EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_GROUP_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/comm/in_memory_rendezvous_store.h"
#include "server/comm/in_process_communicator.h"
#include "server/comm/nccl_communicator.h"
#include "tests/server/comm/fake_nccl.h"

namespace expertmesh {

// A group over one fake NCCL, before and while it forms.
struct FakeNcclGroup {
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

// Ranks of a FakeNcclGroup that exchange bytes, well or not: nobody may misuse NCCL meanwhile.
class FakeNcclGroupTest : public ::testing::Test {
 protected:
  void TearDown() override {
    group_.nccl->ReleaseAborts();
    EXPECT_EQ(group_.nccl->misuses(), "");
  }

  void ExpectNothingLeft() const {
    EXPECT_EQ(group_.nccl->num_live_comms(), 0);
    EXPECT_EQ(group_.nccl->num_live_streams(), 0);
    EXPECT_EQ(group_.nccl->num_live_events(), 0);
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

  FakeNcclGroup group_;
  uint64_t step_ = 1;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_GROUP_H_
