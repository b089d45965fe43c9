#include "server/rpc/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

Bio Reader(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), BIO_free);
}

// A password would be asked for on the terminal otherwise.
int NoPassword(char*, int, int, void*) { return -1; }

Certificate FirstCertificate(const std::string& text) {
  const Bio bio = Reader(text);
  return Certificate(PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr), X509_free);
}

Key PrivateKey(const std::string& text) {
  const Bio bio = Reader(text);
  return Key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, nullptr), EVP_PKEY_free);
}

absl::Status CheckCa(const TlsTexts& texts) {
  if (texts.ca.empty() || FirstCertificate(texts.ca) != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError("--tls_ca: the file has no certificate in PEM form");
}

absl::Status CheckPair(const TlsTexts& texts) {
  if (texts.key.empty()) return absl::InvalidArgumentError("--tls_cert needs --tls_key");
  if (texts.certificate.empty()) {
    return absl::InvalidArgumentError("--tls_key needs --tls_cert");
  }
  const Certificate certificate = FirstCertificate(texts.certificate);
  if (certificate == nullptr) {
    return absl::InvalidArgumentError("--tls_cert: the file has no certificate in PEM form");
  }
  const Key key = PrivateKey(texts.key);
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        "--tls_key: the file has no private key in PEM form without a password");
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return absl::InvalidArgumentError("--tls_key is not the key of the certificate in --tls_cert");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckServerTls(const TlsTexts& texts) {
  if (texts.certificate.empty() && texts.key.empty()) {
    if (texts.ca.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError("--tls_ca needs --tls_cert and --tls_key as well");
  }
  absl::Status status = CheckPair(texts);
  status.Update(CheckCa(texts));
  // What was refused stays in the thread's queue, where gRPC would find it.
  ERR_clear_error();
  return status;
}

absl::Status CheckChannelTls(const TlsTexts& texts) {
  absl::Status status = CheckCa(texts);
  if (!texts.certificate.empty() || !texts.key.empty()) {
    status.Update(CheckPair(texts));
    if (texts.ca.empty()) status.Update(absl::InvalidArgumentError("--tls_cert needs --tls_ca"));
  }
  ERR_clear_error();
  return status;
}

}  // namespace expertmesh
