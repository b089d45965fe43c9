#ifndef EXPERTMESH_SERVER_OPS_CALL_ERROR_H_
#define EXPERTMESH_SERVER_OPS_CALL_ERROR_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

// Errors that reach a caller. They travel as an absl::Status with typed details, through any layer
// that passes statuses on, and only rpc/status_mapping turns them into google.rpc details. A status
// without these details that reaches it is taken for a defect of the server (INTERNAL), unless it
// is CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE, RESOURCE_EXHAUSTED or UNIMPLEMENTED: whoever finds
// fault with a caller's input uses InvalidFieldError or CallError.
//
// All functions are thread-safe and do not block.

namespace expertmesh {

// What google.rpc.ErrorInfo.reason says; expert_service.proto and rank.proto document each. The
// reason fixes the status code.
enum class ErrorReason {
  kInvalidField,         // INVALID_ARGUMENT
  kMalformedMessage,     // INVALID_ARGUMENT
  kModelNotFound,        // NOT_FOUND
  kLayerNotFound,        // NOT_FOUND
  kAdapterNotFound,      // NOT_FOUND
  kFingerprintMismatch,  // FAILED_PRECONDITION
  kNoGateWeights,        // FAILED_PRECONDITION
  kNoSharedExperts,      // FAILED_PRECONDITION
  kOptionDisabled,       // FAILED_PRECONDITION
  kQueueFull,            // RESOURCE_EXHAUSTED, retry
  kBuffersExhausted,     // RESOURCE_EXHAUSTED, retry
  kMessageTooLarge,      // RESOURCE_EXHAUSTED
  kDraining,             // UNAVAILABLE, retry
  kNoEpoch,              // UNAVAILABLE, retry
  kStepLost,             // UNAVAILABLE, retry
  kDeadlinePassed,       // DEADLINE_EXCEEDED
  kCallCancelled,        // CANCELLED
  kNotImplemented,       // UNIMPLEMENTED
  kStepFailed,           // INTERNAL
  kInternalError,        // INTERNAL
  kStaleIncarnation,     // FAILED_PRECONDITION
  kStaleEpoch,           // FAILED_PRECONDITION
  kRankTaken,            // ALREADY_EXISTS
  kWrongModel,           // FAILED_PRECONDITION
  kWrongEpSize,          // FAILED_PRECONDITION
  kWrongInstructionSet,  // FAILED_PRECONDITION
  kProtocolMismatch,     // FAILED_PRECONDITION
  kRankNotAllowed,       // PERMISSION_DENIED
};
inline constexpr int kNumErrorReasons = static_cast<int>(ErrorReason::kRankNotAllowed) + 1;

// The name on the wire, e.g. "QUEUE_FULL".
absl::string_view ErrorReasonName(ErrorReason reason);
// The reason with that name on the wire.
std::optional<ErrorReason> ErrorReasonFromName(absl::string_view name);
// The status code that the reason fixes.
absl::StatusCode ErrorReasonCode(ErrorReason reason);

// Text members are empty where they do not apply. Never a tensor's contents: one offending element
// at most.
struct CallErrorDetails {
  ErrorReason reason = ErrorReason::kInternalError;
  std::string field;  // path from the request, e.g. "hidden_states.shape[1]"
  std::string value;  // what was there
  std::string limit;  // what may be there, e.g. "2048" or "-1 to 127"
  // How long to wait before another try; zero: no use in trying the same again.
  absl::Duration retry_after = absl::ZeroDuration();
};

// What retryable reasons advise unless told otherwise.
inline constexpr absl::Duration kDefaultRetryAfter = absl::Milliseconds(100);

// INVALID_ARGUMENT with the message "<field> is <value>; expected <limit>". `value` may be
// untrusted: it is escaped to printable UTF-8 and cut to 128 bytes. Example:
// InvalidFieldError("topk.topk", topk, "0 to 16").
absl::Status InvalidFieldError(absl::string_view field, const absl::AlphaNum& value,
                               absl::string_view limit);

// The reason's code with `message`, which stands alone as a sentence for the caller.
// A retryable reason gets kDefaultRetryAfter where details.retry_after is zero, NO_EPOCH a second;
// details.reason is overwritten.
absl::Status CallError(ErrorReason reason, absl::string_view message,
                       CallErrorDetails details = {});

// The same for the common case of a wait that is known.
absl::Status RetryableError(ErrorReason reason, absl::string_view message,
                            absl::Duration retry_after);

// The details that the functions above attached; nullopt for any other status.
std::optional<CallErrorDetails> GetCallErrorDetails(const absl::Status& status);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_CALL_ERROR_H_
