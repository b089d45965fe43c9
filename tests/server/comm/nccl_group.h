#ifndef EXPERTMESH_TESTS_SERVER_COMM_NCCL_GROUP_H_
#define EXPERTMESH_TESTS_SERVER_COMM_NCCL_GROUP_H_

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/comm/in_memory_rendezvous_store.h"
#include "server/comm/in_process_communicator.h"
#include "server/comm/nccl_communicator.h"

namespace expertmesh {

// The communicators of a group whose ranks are all in this process.
inline std::vector<std::unique_ptr<Communicator>> NewNcclGroup(
    int32_t ep_size, const std::shared_ptr<NcclFunctions>& nccl, uint64_t incarnation = 0,
    uint64_t epoch = 0) {
  InMemoryRendezvousStore store;
  auto controls = NewInProcessCommunicators(ep_size);
  std::vector<std::unique_ptr<Communicator>> communicators(ep_size);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    threads.emplace_back([&, rank] {
      NcclCommunicatorParams params;
      params.ep_rank = rank;
      params.ep_size = ep_size;
      params.incarnation = incarnation;
      params.epoch = epoch;
      params.functions = nccl;
      params.control = std::move(controls[rank]);
      params.store = &store;
      params.deadline = absl::Now() + absl::Seconds(60);
      params.operation_timeout = absl::Seconds(60);
      params.abort_timeout = absl::Seconds(60);
      params.on_stuck_abort = [](const absl::Status& status) { ADD_FAILURE() << status; };
      auto made = NewNcclCommunicator(std::move(params));
      EXPECT_TRUE(made.ok()) << made.status();
      communicators[rank] = *std::move(made);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return communicators;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_COMM_NCCL_GROUP_H_
