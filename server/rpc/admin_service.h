#ifndef EXPERTMESH_SERVER_RPC_ADMIN_SERVICE_H_
#define EXPERTMESH_SERVER_RPC_ADMIN_SERVICE_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "expertmesh/v1/admin.pb.h"
#include "server/cluster/group_usage.h"
#include "server/cluster/membership.h"
#include "server/control/control_observer.h"
#include "server/ops/server_metrics.h"
#include "server/rpc/open_calls.h"

namespace grpc {
class Service;
}

namespace expertmesh {

inline constexpr char kAdminServiceName[] = "expertmesh.v1.AdminService";

struct AdminServiceOptions {
  const ServerMetrics* metrics = nullptr;
  OpenCalls* open_calls = nullptr;  // counts Drain; GetStatus is answered at once
  // The status now; must not block.
  std::function<v1::GetStatusResponse()> status;
  // Stops taking calls and waits for those admitted, as long as the timeout says, or the server's
  // own where that is zero. Blocking; called on a thread of the service, one call at a time.
  std::function<absl::StatusOr<v1::DrainResponse>(absl::Duration timeout)> drain;
};

// For operators. Calls of Drain beside one another wait for the first one's end and get its answer.
std::unique_ptr<grpc::Service> NewAdminService(AdminServiceOptions options);

// What control/ knows of a GetStatusResponse.
void FillControlStatus(const ControlSnapshot& snapshot, v1::GetStatusResponse* response);

// What rpc/ answered, most of whose errors control/ never hears of.
void FillCallStatus(const ServerMetrics& metrics, v1::GetStatusResponse* response);

// What ranks did in this epoch; after the ranks and the epoch were filled in.
void FillUsage(const GroupUsage& usage, v1::GetStatusResponse* response);

// What cluster/ knows of ranks that are processes.
void FillMemberStatus(absl::Span<const MemberView> members, v1::GetStatusResponse* response);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_ADMIN_SERVICE_H_
