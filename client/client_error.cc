#include "client/client_error.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace expertmesh {
namespace {

constexpr char kDetailsUrl[] = "type.googleapis.com/google.rpc.Status";

constexpr char kRequestBytesUrl[] = "expertmesh/request_bytes";

std::string Metadata(const google::rpc::ErrorInfo& info, const char* key) {
  const auto found = info.metadata().find(key);
  return found == info.metadata().end() ? std::string() : found->second;
}

}  // namespace

absl::Status StatusOfServer(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  if (!status.error_details().empty()) {
    result.SetPayload(kDetailsUrl, absl::Cord(status.error_details()));
  }
  return result;
}

absl::Status WithRequestBytes(absl::Status status, int64_t request_bytes) {
  status.SetPayload(kRequestBytesUrl, absl::Cord(absl::StrCat(request_bytes)));
  return status;
}

std::optional<int64_t> GetRequestBytes(const absl::Status& status) {
  const auto payload = status.GetPayload(kRequestBytesUrl);
  int64_t bytes = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &bytes)) return std::nullopt;
  return bytes;
}

std::optional<ServerErrorDetails> GetServerErrorDetails(const absl::Status& status) {
  const auto payload = status.GetPayload(kDetailsUrl);
  google::rpc::Status details;
  if (!payload.has_value() || !details.ParseFromString(std::string(*payload))) return std::nullopt;
  ServerErrorDetails result;
  bool found = false;
  for (const google::protobuf::Any& any : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (any.Is<google::rpc::ErrorInfo>() && any.UnpackTo(&info) && info.domain() == "expertmesh") {
      found = true;
      result.reason = info.reason();
      result.field = Metadata(info, "field");
      result.value = Metadata(info, "value");
      result.limit = Metadata(info, "limit");
    } else if (any.Is<google::rpc::RetryInfo>() && any.UnpackTo(&retry)) {
      result.retry_after = absl::Seconds(retry.retry_delay().seconds()) +
                           absl::Nanoseconds(retry.retry_delay().nanos());
    }
  }
  if (!found) return std::nullopt;
  return result;
}

}  // namespace expertmesh
