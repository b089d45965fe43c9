#ifndef EXPERTMESH_TESTS_SERVER_COMM_TCP_GROUP_H_
#define EXPERTMESH_TESTS_SERVER_COMM_TCP_GROUP_H_

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "server/comm/in_memory_rendezvous_store.h"
#include "server/comm/tcp_communicator.h"

namespace expertmesh {

// A rank on loopback, of incarnation 5, epoch 6.
inline TcpCommunicatorParams LoopbackTcpParams(int32_t ep_rank, int32_t ep_size,
                                               RendezvousStore* store) {
  TcpCommunicatorParams params;
  params.mesh.ep_rank = ep_rank;
  params.mesh.ep_size = ep_size;
  params.mesh.incarnation = 5;
  params.mesh.epoch = 6;
  params.mesh.bind_address = "127.0.0.1";
  params.mesh.store = store;
  params.mesh.deadline = absl::Now() + absl::Seconds(60);
  params.operation_timeout = absl::Seconds(60);
  return params;
}

// All of them at once, each on a thread of its own.
inline std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> ConnectTcp(
    const std::vector<TcpCommunicatorParams>& params) {
  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> results(params.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < params.size(); ++i) {
    threads.emplace_back([&, i] { results[i] = NewTcpCommunicator(params[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// The communicators of a group whose ranks are all in this process.
inline std::vector<std::unique_ptr<Communicator>> NewTcpGroup(
    int32_t ep_size, absl::Duration operation_timeout = absl::Seconds(60)) {
  InMemoryRendezvousStore store;
  std::vector<TcpCommunicatorParams> params;
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    params.push_back(LoopbackTcpParams(rank, ep_size, &store));
    params.back().operation_timeout = operation_timeout;
  }
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& result : ConnectTcp(params)) communicators.push_back(std::move(result).value());
  return communicators;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_COMM_TCP_GROUP_H_
