#ifndef EXPERTMESH_CLIENT_CLI_CONNECTION_FLAGS_H_
#define EXPERTMESH_CLIENT_CLI_CONNECTION_FLAGS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "client/expert_client.h"

namespace expertmesh {

// A client as --target, --tls_* and --max_attempts say.
absl::StatusOr<std::unique_ptr<ExpertClient>> ClientFromFlags();

// As --timeout says.
CallOptions CallOptionsFromFlags();

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_CONNECTION_FLAGS_H_
