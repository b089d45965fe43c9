#include "server/rpc/tls_credentials.h"

#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"

namespace expertmesh {
namespace {

using grpc::experimental::FileWatcherCertificateProvider;

constexpr unsigned int kSecondsBetweenLooks = 1;

std::shared_ptr<FileWatcherCertificateProvider> Watch(const TlsFiles& files) {
  return std::make_shared<FileWatcherCertificateProvider>(files.key, files.certificate, files.ca,
                                                          kSecondsBetweenLooks);
}

}  // namespace

std::shared_ptr<grpc::ServerCredentials> NewServerCredentials(const TlsFiles& files) {
  if (files.empty()) return grpc::InsecureServerCredentials();
  grpc::experimental::TlsServerCredentialsOptions options(Watch(files));
  options.watch_identity_key_cert_pairs();
  if (!files.ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> NewChannelCredentials(const TlsFiles& files) {
  if (files.empty()) return grpc::InsecureChannelCredentials();
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(Watch(files));
  options.watch_root_certs();
  if (!files.certificate.empty()) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

}  // namespace expertmesh
