#ifndef EXPERTMESH_CLIENT_CLIENT_ERROR_H_
#define EXPERTMESH_CLIENT_CLIENT_ERROR_H_

#include <grpcpp/support/status.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace expertmesh {

// What the server said of an error, from the google.rpc details that it sent with the status.
struct ServerErrorDetails {
  std::string reason;  // ErrorInfo.reason; the list is in expert_service.proto
  std::string field;   // INVALID_ARGUMENT: the field's path
  std::string value;
  std::string limit;
  std::optional<absl::Duration> retry_after;
};

// The same code and message, with the details kept for GetServerErrorDetails.
absl::Status StatusOfServer(const grpc::Status& status);

// The same with the size of the request message that it answers, which this client alone knows:
// what gRPC says of a message that is too large leaves open which way it went.
absl::Status WithRequestBytes(absl::Status status, int64_t request_bytes);
// Nothing for a status that WithRequestBytes did not make. ExpertClient's calls end so with each
// RESOURCE_EXHAUSTED, its streams do not.
std::optional<int64_t> GetRequestBytes(const absl::Status& status);

// Nothing for a status that no ExpertMesh server made (a connection that failed, a proxy's answer).
std::optional<ServerErrorDetails> GetServerErrorDetails(const absl::Status& status);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLIENT_ERROR_H_
