#ifndef EXPERTMESH_SERVER_CONTROL_PLANE_IMPL_H_
#define EXPERTMESH_SERVER_CONTROL_PLANE_IMPL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "expertmesh/v1/admin.pb.h"
#include "grpcpp/impl/service_type.h"
#include "kernels/base/steady_now.h"
#include "server/checkpoints.h"
#include "server/control_plane.h"
#include "server/ops/metrics.h"
#include "server/ops/server_metrics.h"
#include "server/routing/router_table.h"
#include "server/rpc/control_metrics.h"
#include "server/rpc/forward_validation.h"
#include "server/rpc/open_calls.h"
#include "server/rpc/serving_state.h"
#include "server/rpc/tls_watch.h"

namespace expertmesh {

// How it starts is in control_plane.cc, how it ends in control_plane_stop.cc. What stands earlier
// in here outlives what stands later.
struct ControlPlane::Impl {
  explicit Impl(ControlPlaneOptions o)
      : options(std::move(o)),
        metrics(&registry),
        control_metrics(&metrics),
        state(options.controller.limits.max_bytes_in_flight),
        streams(options.streams) {}
  ~Impl() {
    registry.SetRefresh(nullptr);
    registry.SetCollector(nullptr);
    state.StartDraining();
    CloseRanks(SteadyNow());
  }

  absl::Status MakeGroup();
  absl::Status ListenToRanks();
  // Streams end, and with them steps in progress.
  void CloseRanks(absl::Time deadline);
  void OnEpoch(uint64_t epoch);
  void MakeValidator();
  absl::Status StartMetrics();
  const GroupUsage& usage() const {
    return local_group != nullptr ? local_group->usage() : remote_group->usage();
  }
  std::vector<MetricFamily> GroupMetrics() const;
  absl::Status Listen();
  void Serve();
  void StopServing();
  // Blocking. How many calls had to be cut off.
  int64_t EndCalls(absl::Duration timeout);
  // After EndCalls. Blocking.
  void SendAnswersAndShutDown(absl::Time deadline);
  // For AdminService.
  absl::StatusOr<v1::DrainResponse> Drain(absl::Duration timeout);
  v1::GetStatusResponse Status() const;
  void FillRankStatus(bool loaded, v1::GetStatusResponse* response) const;

  const absl::Time start_time = SteadyNow();
  const ControlPlaneOptions options;
  absl::Notification stop;
  MetricsRegistry registry;
  const ServerMetrics metrics;
  std::unique_ptr<MetricsExposer> exposer;
  ControlMetrics control_metrics;
  std::vector<ServedModel> models;
  RouterTable routers;
  // One of them.
  std::unique_ptr<LocalExpertGroup> local_group;
  std::unique_ptr<RemoteExpertGroup> remote_group;
  ExpertGroup* group = nullptr;
  std::unique_ptr<grpc::Service> rank_service;
  std::unique_ptr<GrpcServer> rank_server;
  std::unique_ptr<ForwardValidator> validator;
  std::unique_ptr<StepController> controller;
  ServingState state;
  ForwardStreamSet streams;
  OpenCalls open_calls;
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<grpc::Service> admin;
  std::string address;
  std::shared_ptr<TlsWatch> tls;
  // Between Start and a Stop that comes while it is loading.
  std::mutex start_mutex;
  bool is_serving = false;
  bool is_stopping = false;                      // readiness does not follow epochs any more
  std::atomic<bool> was_asked_to_drain = false;  // by AdminService
  std::unique_ptr<GrpcServer> server;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_PLANE_IMPL_H_
