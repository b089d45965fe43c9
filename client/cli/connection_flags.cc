#include "client/cli/connection_flags.h"

#include <fstream>
#include <iterator>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cli/flag_error.h"
#include "server/ops/listen_address.h"

ABSL_FLAG(
    std::string, target, "127.0.0.1:50051",
    "HOST:PORT of the service, or a gRPC target that begins with dns:, ipv4:, ipv6: or unix:");
ABSL_FLAG(absl::Duration, timeout, absl::Seconds(30),
          "time for a call, retries included, e.g. 500ms, 10s or 2m");
ABSL_FLAG(int, max_attempts, 4,
          "tries of a call in all; only what the server says may be retried is");
ABSL_FLAG(std::string, tls_ca, "",
          "PEM file of the authority that signed the server's certificate; turns TLS on");
ABSL_FLAG(std::string, tls_cert, "", "PEM file of the client's certificate (mutual TLS)");
ABSL_FLAG(std::string, tls_key, "", "PEM file of the client's key (mutual TLS)");

namespace expertmesh {
namespace {

absl::StatusOr<std::string> ReadPem(const char* flag, const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("--", flag, ": ", path, " cannot be read"));
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (!absl::StrContains(text, "-----BEGIN ")) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", path, " holds no PEM block"));
  }
  return text;
}

// What can be told without reading a file or asking a server.
absl::Status CheckConnectionFlags() {
  if (absl::Status status = CheckCallAddress("target", absl::GetFlag(FLAGS_target)); !status.ok()) {
    return FlagErrorOf(status);
  }
  if (absl::GetFlag(FLAGS_timeout) <= absl::ZeroDuration()) {
    return FlagError(absl::StrCat("--timeout is ",
                                  absl::FormatDuration(absl::GetFlag(FLAGS_timeout)),
                                  "; it takes more than 0, e.g. 500ms or 10s"));
  }
  if (absl::GetFlag(FLAGS_max_attempts) < 1) {
    return FlagError(absl::StrCat("--max_attempts is ", absl::GetFlag(FLAGS_max_attempts),
                                  "; it takes at least 1, which never retries"));
  }
  const bool has_certificate = !absl::GetFlag(FLAGS_tls_cert).empty();
  if (has_certificate == absl::GetFlag(FLAGS_tls_key).empty()) {
    return FlagError("--tls_cert and --tls_key: give both or none");
  }
  if (has_certificate && absl::GetFlag(FLAGS_tls_ca).empty()) {
    return FlagError("--tls_cert needs --tls_ca: without it the server is not verified");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ExpertClient>> ClientFromFlags() {
  if (absl::Status status = CheckConnectionFlags(); !status.ok()) return status;
  ExpertClientOptions options;
  options.target = absl::GetFlag(FLAGS_target);
  options.retry.max_attempts = absl::GetFlag(FLAGS_max_attempts);
  const struct {
    const char* flag;
    std::string path;
    std::string* text;
  } files[] = {{"tls_ca", absl::GetFlag(FLAGS_tls_ca), &options.tls_ca},
               {"tls_cert", absl::GetFlag(FLAGS_tls_cert), &options.tls_certificate},
               {"tls_key", absl::GetFlag(FLAGS_tls_key), &options.tls_key}};
  for (const auto& file : files) {
    absl::StatusOr<std::string> text = ReadPem(file.flag, file.path);
    if (!text.ok()) return text.status();
    *file.text = *std::move(text);
  }
  return ExpertClient::Create(options);
}

CallOptions CallOptionsFromFlags() { return CallOptions{absl::GetFlag(FLAGS_timeout)}; }

}  // namespace expertmesh
