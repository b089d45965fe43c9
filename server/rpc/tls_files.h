#ifndef EXPERTMESH_SERVER_RPC_TLS_FILES_H_
#define EXPERTMESH_SERVER_RPC_TLS_FILES_H_

#include "absl/status/status.h"
#include "server/rpc/grpc_server.h"

namespace expertmesh {

// Whether the PEM texts of --tls_cert, --tls_key and --tls_ca can serve, which gRPC says only when
// it listens, and not which of them is at fault. INVALID_ARGUMENT names the flag: one that another
// needs is missing, a text is no PEM of its kind, the key is not the certificate's. No text at all
// is fine.
absl::Status CheckTlsFiles(const GrpcServerOptions& options);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_TLS_FILES_H_
