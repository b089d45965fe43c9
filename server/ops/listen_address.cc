#include "server/ops/listen_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace expertmesh {
namespace {

constexpr int32_t kMaxPort = 65535;

bool IsHost(absl::string_view host) {
  if (absl::StartsWith(host, "[")) return host.size() > 2 && absl::EndsWith(host, "]");
  return !host.empty() && !absl::StrContains(host, ":");
}

bool IsPort(absl::string_view port) {
  int32_t number = 0;
  return std::all_of(port.begin(), port.end(), absl::ascii_isdigit) &&
         absl::SimpleAtoi(port, &number) && number <= kMaxPort;
}

}  // namespace

absl::Status CheckListenAddress(absl::string_view flag, absl::string_view value) {
  const size_t colon = value.rfind(':');
  if (colon != absl::string_view::npos && IsHost(value.substr(0, colon)) &&
      IsPort(value.substr(colon + 1))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag, " is '", value, "'; expected host:port or [v6]:port, the port 0 to ", kMaxPort));
}

absl::Status CheckCallAddress(absl::string_view flag, absl::string_view value) {
  for (const char* scheme : {"dns:", "ipv4:", "ipv6:", "unix:"}) {
    if (absl::StartsWith(value, scheme)) return absl::OkStatus();
  }
  int32_t port = 0;
  if (CheckListenAddress(flag, value).ok() &&
      absl::SimpleAtoi(value.substr(value.rfind(':') + 1), &port) && port > 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag, " is '", value, "'; expected host:port or [v6]:port, the port 1 to ", kMaxPort));
}

bool IsLocalListenAddress(absl::string_view value) {
  if (absl::StartsWith(value, "unix:")) return true;
  absl::string_view host = value.substr(0, value.rfind(':'));
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  if (host == "localhost") return true;
  const std::string text(host);
  in_addr v4{};
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  if (inet_pton(AF_INET6, text.c_str(), &v6) != 1) return false;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
}

std::string AddressWithPort(const std::string& listen, int port) {
  const size_t colon = listen.rfind(':');
  return absl::StartsWith(listen, "unix:") || colon == std::string::npos
             ? listen
             : absl::StrCat(listen.substr(0, colon), ":", port);
}

absl::Status WritePortFile(const std::string& path, int port) {
  if (path.empty()) return absl::OkStatus();
  const std::string unfinished = absl::StrCat(path, ".tmp");
  {
    std::ofstream file(unfinished);
    file << port << "\n";
    if (!file.flush()) return absl::UnavailableError(absl::StrCat("cannot write ", unfinished));
  }
  if (std::rename(unfinished.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

}  // namespace expertmesh
