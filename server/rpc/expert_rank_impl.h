#ifndef EXPERTMESH_SERVER_RPC_EXPERT_RANK_IMPL_H_
#define EXPERTMESH_SERVER_RPC_EXPERT_RANK_IMPL_H_

// What expert_rank.cc and expert_rank_lanes.cc share; nobody else's.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "expertmesh/v1/rank.grpc.pb.h"
#include "grpcpp/channel.h"
#include "server/comm/communicator.h"
#include "server/rpc/expert_rank.h"
#include "server/rpc/grpc_rendezvous_store.h"
#include "server/rpc/rank_session.h"
#include "server/rpc/step_wire.h"

namespace expertmesh {

struct ExpertRank::Impl {
  explicit Impl(ExpertRankOptions o);

  // expert_rank.cc: membership.
  v1::JoinRequest MakeJoinRequest() const;
  // Of the process, or what it holds on a GPU.
  int64_t MemoryUsedBytes() const;
  absl::StatusOr<v1::JoinResponse> Join();
  // Blocks until the session has ended, for whatever reason. RESOURCE_EXHAUSTED when it could not
  // begin.
  absl::Status RunSession(const v1::JoinResponse& membership);
  void SendHeartbeats(const v1::JoinResponse& membership);

  // expert_rank_lanes.cc: epochs and steps. One of several threads that take the session's commands
  // in turns: who takes a slice lets another one lead while it runs the step, so that steps overlap
  // and none is handed over. Returns when the session has ended.
  void RunLane(RankSession& own, const v1::JoinResponse& membership);
  void Obey(const v1::RunStepsResponse& command, const v1::JoinResponse& membership);
  // The communicator of an epoch; collective, blocks until all ranks have come.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(const v1::EpochBegin& begin);
  absl::Status FormEpoch(const v1::EpochBegin& begin, const v1::JoinResponse& membership);
  void DropEpoch(const absl::Status& reason);
  grpc::ByteBuffer RunStep(ReceivedSlice slice, ComputeTurns::Turn turn);
  // As soon as an epoch's end is known, on whatever thread, and maybe before its beginning has been
  // obeyed. Does not block.
  void AbortEpoch(uint64_t ended, const absl::Status& reason);
  // After something has failed that the device may be the cause of.
  void CheckDevice() const;
  // False when the rank was stopped.
  bool Wait(absl::Duration duration);

  const ExpertRankOptions options;
  uint64_t instance = 0;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::RankService::Stub> stub;

  std::mutex lead;  // whose holder takes commands
  std::mutex steps_mutex;
  std::condition_variable steps_changed;
  int num_running_steps = 0;

  // What ends an epoch from outside of the threads that run it.
  std::mutex epoch_mutex;
  uint64_t last_ended = 0;                     // of the session's epochs
  absl::Status last_end;                       // why
  std::shared_ptr<GrpcRendezvousStore> store;  // while forming
  std::atomic<bool> give_up{false};            // forming

  // For heartbeats.
  std::atomic<v1::RankState> state{v1::RANK_STATE_STANDING_BY};
  std::atomic<uint64_t> epoch{0};
  std::atomic<uint64_t> step{0};

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  bool stopped = false;
  std::shared_ptr<RankSession> session;
  grpc::ClientContext* heartbeat_call = nullptr;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_EXPERT_RANK_IMPL_H_
