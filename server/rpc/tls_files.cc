#include "server/rpc/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <ctime>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

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

// Empty when any of the text's certificates is broken or cut off.
std::vector<Certificate> Chain(const std::string& text) {
  std::vector<Certificate> chain;
  const Bio bio = Reader(text);
  while (X509* next = PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr)) {
    chain.emplace_back(next, X509_free);
  }
  if (ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) chain.clear();
  return chain;
}

Key PrivateKey(const std::string& text) {
  const Bio bio = Reader(text);
  return Key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, nullptr), EVP_PKEY_free);
}

absl::Status CheckCa(const TlsTexts& texts) {
  if (texts.ca.empty() || FirstCertificate(texts.ca) != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError("--tls_ca: the file has no certificate in PEM form");
}

absl::StatusOr<std::string> ReadFlagFile(const char* flag, const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return absl::NotFoundError(absl::StrCat("--", flag, ": cannot read ", path));
  if (text.str().empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, ": nothing in ", path));
  }
  return text.str();
}

struct Pair {
  std::vector<Certificate> chain;
  Key key{nullptr, EVP_PKEY_free};
};

absl::StatusOr<Pair> ReadPair(const TlsTexts& texts) {
  if (texts.key.empty()) return absl::InvalidArgumentError("--tls_cert needs --tls_key");
  if (texts.certificate.empty()) {
    return absl::InvalidArgumentError("--tls_key needs --tls_cert");
  }
  Pair pair;
  pair.chain = Chain(texts.certificate);
  if (pair.chain.empty()) {
    return absl::InvalidArgumentError(
        "--tls_cert: the file has no certificate in PEM form, or a broken one");
  }
  pair.key = PrivateKey(texts.key);
  if (pair.key == nullptr) {
    return absl::InvalidArgumentError(
        "--tls_key: the file has no private key in PEM form without a password");
  }
  if (X509_check_private_key(pair.chain.front().get(), pair.key.get()) != 1) {
    return absl::InvalidArgumentError("--tls_key is not the key of the certificate in --tls_cert");
  }
  return pair;
}

absl::Status CheckPair(const TlsTexts& texts) { return ReadPair(texts).status(); }

absl::Time NotAfter(const X509& certificate) {
  std::tm time = {};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(&certificate), &time) != 1) return absl::InfiniteFuture();
  return absl::FromTM(time, absl::UTCTimeZone());
}

}  // namespace

absl::StatusOr<TlsTexts> ReadTlsFiles(const TlsFiles& files) {
  TlsTexts texts;
  struct Flag {
    const char* name;
    const std::string& path;
    std::string* text;
  };
  for (const Flag& flag :
       {Flag{"tls_cert", files.certificate, &texts.certificate},
        Flag{"tls_key", files.key, &texts.key}, Flag{"tls_ca", files.ca, &texts.ca}}) {
    absl::StatusOr<std::string> text = ReadFlagFile(flag.name, flag.path);
    if (!text.ok()) return text.status();
    *flag.text = *std::move(text);
  }
  return texts;
}

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

absl::StatusOr<TlsIdentity> ReadTlsIdentity(const TlsTexts& texts) {
  absl::StatusOr<Pair> pair = ReadPair(texts);
  ERR_clear_error();
  if (!pair.ok()) return pair.status();
  const Bio bio(BIO_new(BIO_s_mem()), BIO_free);
  bool written = PEM_write_bio_PrivateKey(bio.get(), pair->key.get(), nullptr, nullptr, 0, nullptr,
                                          nullptr) == 1;
  for (const Certificate& certificate : pair->chain) {
    written = written && PEM_write_bio_X509(bio.get(), certificate.get()) == 1;
  }
  if (!written) {
    ERR_clear_error();
    return absl::InvalidArgumentError("--tls_key: a key that cannot be written in PEM form");
  }
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return TlsIdentity{std::string(data, static_cast<size_t>(size)), NotAfter(*pair->chain.front())};
}

}  // namespace expertmesh
