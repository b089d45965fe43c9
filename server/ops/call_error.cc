#include "server/ops/call_error.h"

#include <array>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace expertmesh {
namespace {

constexpr absl::string_view kPayloadUrl = "expertmesh/CallErrorDetails";
constexpr size_t kMaxValueBytes = 128;

struct ReasonEntry {
  absl::string_view name;
  absl::StatusCode code;
  bool retryable = false;
};

// In the order of ErrorReason.
constexpr std::array<ReasonEntry, kNumErrorReasons> kReasons = {{
    {"INVALID_FIELD", absl::StatusCode::kInvalidArgument},
    {"MALFORMED_MESSAGE", absl::StatusCode::kInvalidArgument},
    {"MODEL_NOT_FOUND", absl::StatusCode::kNotFound},
    {"LAYER_NOT_FOUND", absl::StatusCode::kNotFound},
    {"ADAPTER_NOT_FOUND", absl::StatusCode::kNotFound},
    {"FINGERPRINT_MISMATCH", absl::StatusCode::kFailedPrecondition},
    {"NO_GATE_WEIGHTS", absl::StatusCode::kFailedPrecondition},
    {"NO_SHARED_EXPERTS", absl::StatusCode::kFailedPrecondition},
    {"OPTION_DISABLED", absl::StatusCode::kFailedPrecondition},
    {"QUEUE_FULL", absl::StatusCode::kResourceExhausted, true},
    {"BUFFERS_EXHAUSTED", absl::StatusCode::kResourceExhausted, true},
    {"MESSAGE_TOO_LARGE", absl::StatusCode::kResourceExhausted},
    {"DRAINING", absl::StatusCode::kUnavailable, true},
    {"NO_EPOCH", absl::StatusCode::kUnavailable, true},
    {"STEP_LOST", absl::StatusCode::kUnavailable, true},
    {"DEADLINE_PASSED", absl::StatusCode::kDeadlineExceeded},
    {"CALL_CANCELLED", absl::StatusCode::kCancelled},
    {"NOT_IMPLEMENTED", absl::StatusCode::kUnimplemented},
    {"STEP_FAILED", absl::StatusCode::kInternal},
    {"INTERNAL_ERROR", absl::StatusCode::kInternal},
    {"STALE_INCARNATION", absl::StatusCode::kFailedPrecondition},
    {"STALE_EPOCH", absl::StatusCode::kFailedPrecondition},
    {"RANK_TAKEN", absl::StatusCode::kAlreadyExists},
    {"WRONG_MODEL", absl::StatusCode::kFailedPrecondition},
    {"WRONG_EP_SIZE", absl::StatusCode::kFailedPrecondition},
    {"WRONG_INSTRUCTION_SET", absl::StatusCode::kFailedPrecondition},
    {"PROTOCOL_MISMATCH", absl::StatusCode::kFailedPrecondition},
    {"RANK_NOT_ALLOWED", absl::StatusCode::kPermissionDenied},
}};

const ReasonEntry& EntryOf(ErrorReason reason) { return kReasons[static_cast<size_t>(reason)]; }

// Printable ASCII: safe in a proto3 string, in a gRPC status message and in a log line.
std::string Printable(absl::string_view text) { return absl::CHexEscape(text); }

std::string PrintableValue(absl::string_view text) {
  if (text.size() <= kMaxValueBytes) return Printable(text);
  return absl::StrCat(Printable(text.substr(0, kMaxValueBytes)), "... (", text.size(), " bytes)");
}

}  // namespace

absl::string_view ErrorReasonName(ErrorReason reason) { return EntryOf(reason).name; }

std::optional<ErrorReason> ErrorReasonFromName(absl::string_view name) {
  for (int i = 0; i < kNumErrorReasons; ++i) {
    if (kReasons[i].name == name) return static_cast<ErrorReason>(i);
  }
  return std::nullopt;
}

absl::StatusCode ErrorReasonCode(ErrorReason reason) { return EntryOf(reason).code; }

absl::Status InvalidFieldError(absl::string_view field, const absl::AlphaNum& value,
                               absl::string_view limit) {
  CallErrorDetails details;
  details.field = std::string(field);
  details.value = PrintableValue(value.Piece());
  details.limit = std::string(limit);
  const std::string message = absl::StrCat(
      field, " is ", details.value.empty() ? "empty" : details.value, "; expected ", limit);
  return CallError(ErrorReason::kInvalidField, message, std::move(details));
}

absl::Status CallError(ErrorReason reason, absl::string_view message, CallErrorDetails details) {
  const ReasonEntry& entry = EntryOf(reason);
  if (entry.retryable && details.retry_after <= absl::ZeroDuration()) {
    // A rank takes a second at least to come back, and to load its experts first a minute or more.
    details.retry_after = reason == ErrorReason::kNoEpoch ? absl::Seconds(1) : kDefaultRetryAfter;
  }
  absl::Status status(entry.code, message);
  // Escaped, the members hold no line feed.
  status.SetPayload(kPayloadUrl, absl::Cord(absl::StrJoin(
                                     {std::string(entry.name), absl::CEscape(details.field),
                                      absl::CEscape(details.value), absl::CEscape(details.limit),
                                      absl::StrCat(absl::ToInt64Microseconds(details.retry_after))},
                                     "\n")));
  return status;
}

absl::Status RetryableError(ErrorReason reason, absl::string_view message,
                            absl::Duration retry_after) {
  CallErrorDetails details;
  details.retry_after = retry_after;
  return CallError(reason, message, std::move(details));
}

std::optional<CallErrorDetails> GetCallErrorDetails(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayloadUrl);
  if (!payload.has_value()) return std::nullopt;
  const std::vector<std::string> parts = absl::StrSplit(std::string(*payload), '\n');
  if (parts.size() != 5) return std::nullopt;
  const std::optional<ErrorReason> reason = ErrorReasonFromName(parts[0]);
  CallErrorDetails details;
  int64_t retry_micros = 0;
  if (!reason.has_value() || !absl::CUnescape(parts[1], &details.field) ||
      !absl::CUnescape(parts[2], &details.value) || !absl::CUnescape(parts[3], &details.limit) ||
      !absl::SimpleAtoi(parts[4], &retry_micros)) {
    return std::nullopt;
  }
  details.reason = *reason;
  details.retry_after = absl::Microseconds(retry_micros);
  return details;
}

}  // namespace expertmesh
