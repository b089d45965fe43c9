#ifndef EXPERTMESH_TESTS_SERVER_RPC_LINKED_RANKS_H_
#define EXPERTMESH_TESTS_SERVER_RPC_LINKED_RANKS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "grpcpp/impl/service_type.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/cluster/remote_expert_group.h"
#include "server/model/weight_source.h"
#include "server/rank/rank_engine.h"
#include "server/rpc/expert_rank.h"
#include "server/rpc/grpc_server.h"

namespace expertmesh {

// Memory that can be had until a test says otherwise.
class FailingMemory : public Allocator {
 public:
  Device device() const override { return Device{}; }
  absl::StatusOr<Buffer> Allocate(int64_t size_bytes) override {
    if (num_failures_ > 0 && num_failures_.fetch_sub(1) > 0) {
      return absl::ResourceExhaustedError("none left, says the test");
    }
    return pool_.Allocate(size_bytes);
  }
  void FailNext(int num_failures) { num_failures_ = num_failures; }

 protected:
  void Free(std::byte*, int64_t) override { std::abort(); }  // all is the pool's

 private:
  HostBufferPool pool_;
  std::atomic<int> num_failures_{0};
};

// A control plane's end of the rank link and expert servers' ends, in one process over loopback:
// everything but the programs' mains is the real thing.
class LinkedRanks {
 public:
  struct Options {
    int32_t ep_size = 2;
    RemoteExpertGroupOptions group;
    Clock* clock = nullptr;               // of the group; null: the steady one
    std::shared_ptr<NcclFunctions> nccl;  // null: ranks exchange over TCP alone
  };
  // Loads all of `source`; returns when the first epoch stands. Aborts where that cannot be.
  LinkedRanks(const WeightSource& source, const Options& options);
  // Stops the ranks first.
  ~LinkedRanks();

  RemoteExpertGroup& group() { return *group_; }
  int port() const { return server_->port(); }
  ExpertRank& rank(int32_t ep_rank) { return *ranks_[ep_rank]->rank; }
  // Of what the control plane receives from ranks, and of what a rank receives.
  FailingMemory& control_memory() { return *control_memory_; }
  FailingMemory& rank_memory(int32_t ep_rank) { return *ranks_[ep_rank]->memory; }

  // Ends a rank's Run and waits for it; gives what it returned.
  absl::Status StopRank(int32_t ep_rank);
  // Blocks until an epoch after `epoch` stands; false after a minute.
  bool AwaitEpochAfter(uint64_t epoch);
  // Blocks until the rank is a member, another one than `than`; its id, 0 after a minute.
  uint64_t AwaitMember(int32_t ep_rank, uint64_t than);

 private:
  struct Rank {
    std::shared_ptr<FailingMemory> memory;
    std::unique_ptr<RankEngine> engine;
    std::unique_ptr<ExpertRank> rank;
    std::thread thread;
    absl::Status result;
  };

  const std::shared_ptr<FailingMemory> control_memory_ = std::make_shared<FailingMemory>();
  std::unique_ptr<RemoteExpertGroup> group_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<GrpcServer> server_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_RPC_LINKED_RANKS_H_
