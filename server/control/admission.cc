#include "server/control/admission.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

constexpr double kMemorySeconds = 2.0;
constexpr absl::Duration kMinRetry = absl::Milliseconds(1);
constexpr absl::Duration kMaxRetry = absl::Seconds(5);

absl::Status TooLarge(const char* what, int64_t value, int64_t limit) {
  CallErrorDetails details;
  details.field = "hidden_states";
  details.value = absl::StrCat(value, " ", what);
  details.limit = absl::StrCat(limit, " ", what);
  return CallError(ErrorReason::kMessageTooLarge,
                   absl::StrCat("the call needs ", value, " ", what, "; this server takes at most ",
                                limit, " ", what, " at once: send it in parts"),
                   details);
}

}  // namespace

void Admission::Pace::Add(double amount, absl::Time now) {
  sum = PerSecond(now) * kMemorySeconds + amount;
  at = std::max(at, now);
}

double Admission::Pace::PerSecond(absl::Time now) const {
  if (at == absl::InfinitePast()) return 0.0;
  const double age = std::max(0.0, absl::ToDoubleSeconds(now - at));
  return sum / kMemorySeconds * std::exp(-age / kMemorySeconds);
}

absl::Duration Admission::TimeToFree(double excess, const Pace& pace, absl::Time now) const {
  if (excess <= 0) return absl::ZeroDuration();
  const double per_second = pace.PerSecond(now);
  // Nothing finished lately: there is no pace to go by.
  if (per_second * absl::ToDoubleSeconds(kMaxRetry) < excess) {
    return per_second == 0.0 ? kDefaultRetryAfter : kMaxRetry;
  }
  return std::max(absl::Seconds(excess / per_second), kMinRetry);
}

absl::Status Admission::Admit(int64_t bytes, int64_t tokens, absl::Time now) {
  if (bytes > limits_.max_bytes_in_flight) {
    return TooLarge("bytes", bytes, limits_.max_bytes_in_flight);
  }
  if (tokens > limits_.max_tokens_in_flight) {
    return TooLarge("tokens", tokens, limits_.max_tokens_in_flight);
  }
  // No sum overflows: each in-flight count is within its limit, and so is the addend.
  const double excess_bytes = static_cast<double>(bytes_in_flight_) + static_cast<double>(bytes) -
                              static_cast<double>(limits_.max_bytes_in_flight);
  const double excess_tokens = static_cast<double>(tokens_in_flight_) +
                               static_cast<double>(tokens) -
                               static_cast<double>(limits_.max_tokens_in_flight);
  if (bytes > limits_.max_bytes_in_flight - bytes_in_flight_ ||
      tokens > limits_.max_tokens_in_flight - tokens_in_flight_) {
    return RetryableError(
        ErrorReason::kQueueFull,
        absl::StrCat("too much is waiting: ", tokens_in_flight_, " of ",
                     limits_.max_tokens_in_flight, " tokens and ", bytes_in_flight_, " of ",
                     limits_.max_bytes_in_flight, " bytes are in flight"),
        std::max({TimeToFree(excess_bytes, bytes_pace_, now),
                  TimeToFree(excess_tokens, tokens_pace_, now), kMinRetry}));
  }
  bytes_in_flight_ += bytes;
  tokens_in_flight_ += tokens;
  return absl::OkStatus();
}

void Admission::Release(int64_t bytes, int64_t tokens, absl::Time now) {
  bytes_in_flight_ -= bytes;
  tokens_in_flight_ -= tokens;
  bytes_pace_.Add(static_cast<double>(bytes), now);
  tokens_pace_.Add(static_cast<double>(tokens), now);
}

}  // namespace expertmesh
