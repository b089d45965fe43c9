#include "server/rpc/answered_calls.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

// kDebug: nothing that an operator should be told.
LogLevel LevelOf(const AnsweredCall& call) {
  if (call.code == absl::StatusCode::kInternal) return LogLevel::kError;
  if (call.code != absl::StatusCode::kUnavailable) return LogLevel::kDebug;
  const std::optional<CallErrorDetails> details = GetCallErrorDetails(call.status);
  const bool is_draining = details.has_value() && details->reason == ErrorReason::kDraining;
  return is_draining ? LogLevel::kDebug : LogLevel::kWarning;
}

}  // namespace

void AnsweredCalls::Count(const AnsweredCall& call) {
  metrics_.CountCall(call.method, call.code, absl::ToDoubleSeconds(call.elapsed));
  metrics_.calls_in_flight[static_cast<int>(call.method)].Add(-1);
  if (LogEnabled(LogLevel::kDebug)) {
    LogDebug("a call ended",
             {{"method", CallMethodName(call.method)},
              {"request_id", call.request_id},
              {"stream_seq", call.stream_seq.has_value() ? absl::StrCat(*call.stream_seq) : ""},
              {"code", static_cast<int>(call.code)},
              {"error", call.status.message()},
              {"tokens", call.num_tokens},
              {"micros", absl::ToInt64Microseconds(call.elapsed)}});
  }
  const LogLevel level = LevelOf(call);
  if (level != LogLevel::kDebug) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Failures& failures = level == LogLevel::kError ? internal_ : unavailable_;
    ++failures.num_calls;
    failures.request_id = std::string(call.request_id);
    failures.code = call.code;
    failures.error = std::string(call.status.message());
    has_untold_.store(true, std::memory_order_relaxed);
  }
  // Whatever the answer: those that came between two lines are told of when nothing fails any more.
  if (!has_untold_.load(std::memory_order_relaxed)) return;
  Tell(LogLevel::kError, kInterval);
  Tell(LogLevel::kWarning, kInterval);
}

AnsweredCalls::~AnsweredCalls() {
  Tell(LogLevel::kError, absl::ZeroDuration());
  Tell(LogLevel::kWarning, absl::ZeroDuration());
}

void AnsweredCalls::Tell(LogLevel level, absl::Duration interval) {
  Failures told;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Failures& failures = level == LogLevel::kError ? internal_ : unavailable_;
    const absl::Time now = clock_.Now();
    if (failures.num_calls == 0 || now < failures.told_at + interval) return;
    told = std::exchange(failures, Failures{.told_at = now});
    has_untold_.store(internal_.num_calls + unavailable_.num_calls > 0, std::memory_order_relaxed);
  }
  Log(level, "calls failed, and not through their clients",
      {{"calls", told.num_calls},
       {"code", absl::StatusCodeToString(told.code)},
       {"last_request_id", told.request_id},
       {"error", told.error}});
}

}  // namespace expertmesh
