#include "server/rpc/tls_credentials.h"

#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "server/rpc/tls_watch.h"

namespace expertmesh {
namespace {

using grpc::experimental::FileWatcherCertificateProvider;

constexpr unsigned int kSecondsBetweenLooks = 1;

std::shared_ptr<FileWatcherCertificateProvider> Provider(const TlsWatch& watch) {
  return std::make_shared<FileWatcherCertificateProvider>(
      watch.identity_path(), watch.identity_path(), watch.ca_path(), kSecondsBetweenLooks);
}

}  // namespace

std::shared_ptr<grpc::ServerCredentials> NewServerCredentials(const TlsWatch* watch) {
  if (watch == nullptr) return grpc::InsecureServerCredentials();
  grpc::experimental::TlsServerCredentialsOptions options(Provider(*watch));
  options.watch_identity_key_cert_pairs();
  if (!watch->ca_path().empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> NewChannelCredentials(const TlsWatch* watch) {
  if (watch == nullptr) return grpc::InsecureChannelCredentials();
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(Provider(*watch));
  options.watch_root_certs();
  if (!watch->identity_path().empty()) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

}  // namespace expertmesh
