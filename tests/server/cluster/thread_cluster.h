#ifndef EXPERTMESH_TESTS_SERVER_CLUSTER_THREAD_CLUSTER_H_
#define EXPERTMESH_TESTS_SERVER_CLUSTER_THREAD_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/cluster/remote_expert_group.h"
#include "server/comm/communicator.h"
#include "server/model/weight_source.h"
#include "server/rank/rank_engine.h"

namespace expertmesh {

// A RemoteExpertGroup whose ranks are threads of this process instead of expert servers: the
// control plane's side and the engines are the real ones, the communicator what a test makes of it.
class ThreadCluster {
 public:
  struct Options {
    int32_t ep_size = 1;
    int threads_per_rank = 1;
    // [ep_size] of one group; null: in-process ones.
    std::function<std::vector<std::unique_ptr<Communicator>>(int32_t ep_size)> communicate;
    // Stands between the engines and the communicators; may be null.
    std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)> wrap;
    // Makes of a rank's result what the group is told, on any thread; may be null.
    std::function<absl::StatusOr<RankStepResult>(absl::StatusOr<RankStepResult>)> report;
  };

  // Loads all layers of `source`, which it does not need afterwards, and stands in epoch 1.
  static absl::StatusOr<std::unique_ptr<ThreadCluster>> Start(const WeightSource& source,
                                                              const Options& options);
  // No step may be in flight.
  ~ThreadCluster();

  RemoteExpertGroup& group() { return *group_; }

 private:
  class Rank;
  ThreadCluster();

  std::vector<std::unique_ptr<RankEngine>> engines_;
  std::unique_ptr<RemoteExpertGroup> group_;
  std::vector<std::shared_ptr<Rank>> ranks_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_CLUSTER_THREAD_CLUSTER_H_
