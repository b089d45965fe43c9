#ifndef EXPERTMESH_TESTS_INTEGRATION_NCCL_CLUSTER_H_
#define EXPERTMESH_TESTS_INTEGRATION_NCCL_CLUSTER_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/integration/process.h"
#include "tests/integration/rank_cluster.h"
#include "tests/integration/server_under_test.h"

namespace expertmesh {

inline constexpr char kGpuExpertServer[] = "expertmesh-expert-server-emulated-gpu";

// A control plane and ranks that are processes, each with an emulated GPU of its own, which
// exchange rows by the library that stands in for NCCL between processes.
inline RankCluster::Options NcclCluster(int32_t ep_size, const std::string& checkpoint) {
  RankCluster::Options options;
  options.checkpoint = checkpoint;
  options.ep_size = ep_size;
  options.expert_server = kGpuExpertServer;
  options.rank_args = {"--device=cuda:0",
                       absl::StrCat("--nccl_library=", SiblingBinary("libnccl_over_sockets.so"))};
  return options;
}

// One process with ranks on an emulated GPU inside itself, as an Oracle: the same placement and
// instruction set, so the same bytes.
inline ServerUnderTest::Options GpuInOneProcess(const std::string& checkpoint) {
  ServerUnderTest::Options options;
  options.program = "expertmesh-control-plane-emulated-gpu";
  options.checkpoint = checkpoint;
  options.args = {"--device=cuda:0"};
  return options;
}

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_NCCL_CLUSTER_H_
