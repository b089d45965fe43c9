#ifndef EXPERTMESH_SERVER_RPC_GRPC_DEADLINE_H_
#define EXPERTMESH_SERVER_RPC_GRPC_DEADLINE_H_

#include <chrono>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/base/steady_now.h"

namespace expertmesh {

// gRPC keeps its deadlines on the steady clock too, but takes and gives them as the wall clock's
// time; so each is turned round where it crosses.

inline std::chrono::system_clock::time_point ToGrpcDeadline(absl::Time deadline) {
  return absl::ToChronoTime(absl::Now() + (deadline - SteadyNow()));
}
inline std::chrono::system_clock::time_point ToGrpcDeadline(absl::Duration timeout) {
  return absl::ToChronoTime(absl::Now() + timeout);
}
inline absl::Time FromGrpcDeadline(std::chrono::system_clock::time_point deadline) {
  return SteadyNow() + (absl::FromChrono(deadline) - absl::Now());
}

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_GRPC_DEADLINE_H_
