#include "server/rpc/status_mapping.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "google/rpc/error_details.pb.h"
#include "server/ops/call_error.h"
#include "server/rpc/wire_reader.h"

namespace expertmesh {
namespace {

constexpr size_t kMaxMessageBytes = 1024;
constexpr size_t kMaxMetadataBytes = 256;
constexpr char kField[] = "field";
constexpr char kValue[] = "value";
constexpr char kLimit[] = "limit";

// Protobuf refuses to read a string that is not UTF-8.
std::string SafeText(absl::string_view text, size_t max_bytes) {
  std::string safe = IsValidUtf8(text) ? std::string(text) : absl::CHexEscape(text);
  if (safe.size() <= max_bytes) return safe;
  size_t end = max_bytes - 3;
  while (end > 0 && (static_cast<uint8_t>(safe[end]) & 0xc0) == 0x80) --end;
  safe.resize(end);
  safe += "...";
  return safe;
}

// What an error says that no layer meant for a caller.
ErrorReason DefaultReason(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kCancelled:
      return ErrorReason::kCallCancelled;
    case absl::StatusCode::kDeadlineExceeded:
      return ErrorReason::kDeadlinePassed;
    case absl::StatusCode::kUnavailable:
      return ErrorReason::kStepLost;
    case absl::StatusCode::kResourceExhausted:
      return ErrorReason::kBuffersExhausted;
    case absl::StatusCode::kUnimplemented:
      return ErrorReason::kNotImplemented;
    default:
      return ErrorReason::kInternalError;
  }
}

google::protobuf::Duration ToProto(absl::Duration duration) {
  google::protobuf::Duration proto;
  proto.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  proto.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
  return proto;
}

}  // namespace

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  google::rpc::Status rpc_status;
  if (status.ok()) return rpc_status;
  std::optional<CallErrorDetails> details = GetCallErrorDetails(status);
  if (!details.has_value()) {
    const absl::Status told = CallError(DefaultReason(status.code()), status.message());
    details = GetCallErrorDetails(told);
  }
  rpc_status.set_code(static_cast<int>(ErrorReasonCode(details->reason)));
  rpc_status.set_message(SafeText(status.message(), kMaxMessageBytes));

  google::rpc::ErrorInfo info;
  info.set_reason(std::string(ErrorReasonName(details->reason)));
  info.set_domain(kErrorDomain);
  auto& metadata = *info.mutable_metadata();
  const std::string field = SafeText(details->field, kMaxMetadataBytes);
  if (!field.empty()) metadata[kField] = field;
  if (!details->value.empty()) metadata[kValue] = SafeText(details->value, kMaxMetadataBytes);
  if (!details->limit.empty()) metadata[kLimit] = SafeText(details->limit, kMaxMetadataBytes);
  rpc_status.add_details()->PackFrom(info);

  if (!field.empty() && details->reason == ErrorReason::kInvalidField) {
    google::rpc::BadRequest bad_request;
    auto* violation = bad_request.add_field_violations();
    violation->set_field(field);
    violation->set_description(rpc_status.message());
    rpc_status.add_details()->PackFrom(bad_request);
  }
  if (details->retry_after > absl::ZeroDuration()) {
    google::rpc::RetryInfo retry;
    *retry.mutable_retry_delay() = ToProto(details->retry_after);
    rpc_status.add_details()->PackFrom(retry);
  }
  return rpc_status;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status();
  const google::rpc::Status rpc_status = ToRpcStatus(status);
  return grpc::Status(static_cast<grpc::StatusCode>(rpc_status.code()), rpc_status.message(),
                      rpc_status.SerializeAsString());
}

absl::Status FromRpcStatus(const google::rpc::Status& status) {
  if (status.code() == 0) return absl::OkStatus();
  const bool known =
      status.code() > 0 && status.code() <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  const absl::StatusCode code =
      known ? static_cast<absl::StatusCode>(status.code()) : absl::StatusCode::kUnknown;
  std::optional<ErrorReason> reason;
  CallErrorDetails details;
  for (const google::protobuf::Any& any : status.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (any.UnpackTo(&info) && info.domain() == kErrorDomain) {
      reason = ErrorReasonFromName(info.reason());
      for (const auto& [key, text] : info.metadata()) {
        if (key == kField) details.field = text;
        if (key == kValue) details.value = text;
        if (key == kLimit) details.limit = text;
      }
    } else if (any.UnpackTo(&retry)) {
      details.retry_after = absl::Seconds(retry.retry_delay().seconds()) +
                            absl::Nanoseconds(retry.retry_delay().nanos());
    }
  }
  if (reason.has_value() && ErrorReasonCode(*reason) == code) {
    return CallError(*reason, status.message(), std::move(details));
  }
  return absl::Status(code, status.message());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  google::rpc::Status rpc_status;
  if (!status.error_details().empty() && rpc_status.ParseFromString(status.error_details()) &&
      rpc_status.code() == static_cast<int>(status.error_code())) {
    return FromRpcStatus(rpc_status);
  }
  rpc_status.Clear();
  rpc_status.set_code(static_cast<int>(status.error_code()));
  rpc_status.set_message(SafeText(status.error_message(), kMaxMessageBytes));
  return FromRpcStatus(rpc_status);
}

}  // namespace expertmesh
