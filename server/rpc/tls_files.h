#ifndef EXPERTMESH_SERVER_RPC_TLS_FILES_H_
#define EXPERTMESH_SERVER_RPC_TLS_FILES_H_

#include <string>

#include "absl/status/status.h"

namespace expertmesh {

// What stands in TlsFiles.
struct TlsTexts {
  std::string certificate;
  std::string key;
  std::string ca;
};

// Whether the PEM texts of --tls_cert, --tls_key and --tls_ca can serve, which gRPC says only when
// it listens, and not which of them is at fault. INVALID_ARGUMENT names the flag: one that another
// needs is missing, a text is no PEM of its kind, the key is not the certificate's. No text at all
// is fine, and for who dials a CA alone.
absl::Status CheckServerTls(const TlsTexts& texts);
absl::Status CheckChannelTls(const TlsTexts& texts);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_TLS_FILES_H_
