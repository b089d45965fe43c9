#ifndef EXPERTMESH_SERVER_EXPERT_SERVER_H_
#define EXPERTMESH_SERVER_EXPERT_SERVER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cuda/cuda_device.h"
#include "server/model/checkpoint_weight_source.h"
#include "server/rpc/tls_files.h"

namespace expertmesh {

struct ExpertServerOptions {
  std::vector<std::pair<std::string, std::string>> models;  // as ControlPlaneOptions
  std::string architecture;
  Fp8Weights fp8_weights = Fp8Weights::kDequantize;
  int32_t ep_rank = 0;
  int32_t ep_size = 1;
  std::string control_plane;  // host:port of its rank listener
  // Numeric; of the communicator, see TcpMeshParams.
  std::string bind_address;
  std::string advertise_address;  // empty: bind_address
  absl::Duration join_timeout = absl::Seconds(60);
  int num_threads = 0;  // 0: one for each core
  std::optional<CpuIsa> isa;
  // The GPU that computes instead of the CPU; then ranks exchange rows by NCCL, whose library is
  // this file (empty: as OpenNcclLibrary, and with one rank none).
  std::shared_ptr<CudaDevice> device;
  std::string nccl_library;
  bool progress_on_terminal = false;
  TlsFiles tls;
};

// One rank as a process: what it does after its flags were read.
class ExpertServer {
 public:
  explicit ExpertServer(ExpertServerOptions options);
  ~ExpertServer();

  // Tries --listen, opens the checkpoints and loads this rank's experts. Blocking. Errors are for
  // the user.
  absl::Status Load();
  // After Load: as ExpertRank::Run.
  absl::Status Run();
  // From any thread, once. While Load is running, which nothing can interrupt, it ends the process
  // with 0.
  void Stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_EXPERT_SERVER_H_
