#ifndef EXPERTMESH_SERVER_RPC_TLS_FILES_H_
#define EXPERTMESH_SERVER_RPC_TLS_FILES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace expertmesh {

// Paths of PEM files: --tls_cert, --tls_key and --tls_ca, empty where the flag is.
struct TlsFiles {
  std::string certificate;  // chain
  std::string key;
  std::string ca;
  bool empty() const { return certificate.empty() && ca.empty(); }
};

// What stands in them.
struct TlsTexts {
  std::string certificate;
  std::string key;
  std::string ca;
  bool operator==(const TlsTexts&) const = default;
};

// NOT_FOUND (cannot be read) and INVALID_ARGUMENT (an empty file, which would silently count as
// none) name the flag and the file.
absl::StatusOr<TlsTexts> ReadTlsFiles(const TlsFiles& files);

// Whether the PEM texts of --tls_cert, --tls_key and --tls_ca can serve, which gRPC says only when
// it listens, and not which of them is at fault. INVALID_ARGUMENT names the flag: one that another
// needs is missing, a text is no PEM of its kind, the key is not the certificate's. No text at all
// is fine, and for who dials a CA alone.
absl::Status CheckServerTls(const TlsTexts& texts);
absl::Status CheckChannelTls(const TlsTexts& texts);

// A certificate's chain and its key as one text, and nothing else that stood beside them.
struct TlsIdentity {
  std::string pem;
  absl::Time not_after;  // of the certificate
};
// INVALID_ARGUMENT where the checks above would say so.
absl::StatusOr<TlsIdentity> ReadTlsIdentity(const TlsTexts& texts);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_TLS_FILES_H_
