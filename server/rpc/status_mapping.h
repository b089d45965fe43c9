#ifndef EXPERTMESH_SERVER_RPC_STATUS_MAPPING_H_
#define EXPERTMESH_SERVER_RPC_STATUS_MAPPING_H_

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"

// The only place where internal statuses become what callers see, and back. Thread-safe.

namespace expertmesh {

inline constexpr char kErrorDomain[] = "expertmesh";

// Every error gets google.rpc.ErrorInfo {reason, domain "expertmesh", metadata field/value/limit},
// BadRequest where a field of the request is at fault, RetryInfo where a retry is advised: from the
// details that ops/call_error.h attached. An error without them keeps its code where that says all
// (CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE, RESOURCE_EXHAUSTED, UNIMPLEMENTED) and otherwise is
// INTERNAL (INTERNAL_ERROR), because then no layer meant it for a caller.
// The message is made valid UTF-8 and cut to 1,024 bytes, so that it fits gRPC's trailers.
google::rpc::Status ToRpcStatus(const absl::Status& status);
grpc::Status ToGrpcStatus(const absl::Status& status);

// The way back, on the rank link: code, message, and the details of ToRpcStatus, so that an error
// may cross several processes. Codes outside the known ones are UNKNOWN.
absl::Status FromRpcStatus(const google::rpc::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_STATUS_MAPPING_H_
