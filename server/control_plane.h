#ifndef EXPERTMESH_SERVER_CONTROL_PLANE_H_
#define EXPERTMESH_SERVER_CONTROL_PLANE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/cluster/local_expert_group.h"
#include "server/cluster/remote_expert_group.h"
#include "server/control/step_controller.h"
#include "server/model/checkpoint_weight_source.h"
#include "server/rpc/forward_stream_set.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/tls_files.h"

namespace expertmesh {

struct ControlPlaneOptions {
  std::vector<std::pair<std::string, std::string>> models;  // name (empty: the folder's), folder
  std::string architecture;  // reads them as this one; empty: as config.json says
  Fp8Weights fp8_weights = Fp8Weights::kDequantize;  // of `group`
  std::string metrics_listen;                        // empty: none
  size_t metrics_top_experts = 32;                   // of each model; the others share a series
  std::string port_file;                             // gets the gRPC port's number; empty: none
  absl::Duration drain_timeout = absl::Seconds(30);
  absl::Duration drain_delay = absl::ZeroDuration();
  bool allow_dispatch_option = false;
  DispatchMode dispatch = DispatchMode::kAuto;  // of requests that do not choose
  bool allow_admin = false;                     // AdminService on the public listener
  ForwardStreamLimits streams;
  bool progress_on_terminal = false;
  LocalExpertGroupOptions group;
  // Ranks that are other processes, instead of `group`: where they dial.
  std::string rank_listen;     // empty: none
  std::string rank_port_file;  // as port_file
  std::vector<std::string> rank_tls_names;
  RemoteExpertGroupOptions ranks;
  StepControllerOptions controller;
  TlsFiles tls;              // of both listeners
  GrpcServerOptions server;  // but for what `tls` says
};

// The control plane, with its ranks inside or dialled by them: what the process does after its
// flags were read. server/README.md walks a request through it.
class ControlPlane {
 public:
  explicit ControlPlane(ControlPlaneOptions options);
  ~ControlPlane();

  // Opens the checkpoints, listens (calls wait), loads, serves. Blocking. Errors are for the user:
  // they name the file, flag or address.
  absl::Status Start();
  // From any thread, once. While Start is loading, which nothing can interrupt, it refuses the
  // calls that wait and ends the process with 0.
  void Stop();
  // After Start: blocks until Stop; then health says NOT_SERVING, new calls get UNAVAILABLE
  // (DRAINING), and those admitted end, or are cut off after drain_timeout; the listener takes new
  // connections for drain_delay. Answers that are not read and ranks that do not leave get what is
  // left of drain_timeout, and a second or two on top.
  void WaitForStopAndDrain();
  // Calls whose clients have not been answered in full, streams among them. Any thread.
  int64_t num_open_calls() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_PLANE_H_
