#ifndef EXPERTMESH_TESTS_INTEGRATION_RANK_CLUSTER_H_
#define EXPERTMESH_TESTS_INTEGRATION_RANK_CLUSTER_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/integration/process.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {

// A control plane and expert servers, all real processes on loopback. Functions fail the current
// test and return null or false when something does not come up.
class RankCluster {
 public:
  struct Options {
    std::string checkpoint;
    int32_t ep_size = 2;
    std::vector<std::string> control_args;
    std::vector<std::string> rank_args;
    std::vector<std::string> rank_environment;
    std::string expert_server = "expertmesh-expert-server";
  };
  // Returns when the first epoch stands.
  static std::unique_ptr<RankCluster> Start(const Options& options);
  static std::unique_ptr<RankCluster> StartWithoutEpoch(const Options& options);

  // Until the next RestartControl.
  ServerUnderTest& control() { return *control_; }
  // Any thread; it stays, even killed, as long as it is held.
  std::shared_ptr<ServerUnderTest> shared_control() const;
  ServerProcess& rank(int32_t ep_rank) { return *ranks_[ep_rank]; }

  // That ranks dial.
  int rank_port() const { return rank_port_; }
  // Starts (again) a rank's process.
  bool StartRank(int32_t ep_rank);
  // Any expert server that dials this cluster's control plane, with further arguments.
  std::unique_ptr<ServerProcess> StartExpertServer(std::vector<std::string> args);
  // Blocks until the control plane says that this epoch, or one soon after it, stands.
  bool WaitForEpoch(uint64_t epoch);
  // SIGKILL, and another one on the same rank port.
  bool RestartControl() { return KillControl() && StartControlAgain(); }
  bool KillControl();
  bool StartControlAgain() { return StartControl(rank_port_); }

 private:
  explicit RankCluster(Options options) : options_(std::move(options)) {}
  bool StartControl(int rank_port);

  const Options options_;
  int rank_port_ = 0;
  mutable std::mutex control_mutex_;  // of control_'s changes
  std::shared_ptr<ServerUnderTest> control_;
  std::vector<std::unique_ptr<ServerProcess>> ranks_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_RANK_CLUSTER_H_
