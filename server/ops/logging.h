#ifndef EXPERTMESH_SERVER_OPS_LOGGING_H_
#define EXPERTMESH_SERVER_OPS_LOGGING_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace expertmesh {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };
enum class LogFormat : uint8_t {
  kText,  // 2026-11-29 17:04:05.678901 I message key=value key="va lue"
  kJson,  // {"time":"2026-11-29T17:04:05.678901Z","level":"info","message":"…","key":value,…}
};

struct LoggingOptions {
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
};

// INVALID_ARGUMENT names the known ones: "debug", "info", "warning", "error"; "text", "json".
absl::StatusOr<LogLevel> ParseLogLevel(std::string_view name);
absl::StatusOr<LogFormat> ParseLogFormat(std::string_view name);

// One key with its value. Numbers and booleans stay such in JSON. Values may come from outside:
// they are escaped so that a line stays one line. Never a tensor's elements.
class LogField {
 public:
  // std::string, std::string_view, absl::string_view (a type of its own in Debian's absl).
  template <typename T>
  requires requires(const T& text) { std::string_view(text.data(), text.size()); }
  LogField(std::string_view key, const T& value)
      : key_(key), value_(value.data(), value.size()), quoted_(true) {}
  LogField(std::string_view key, const char* value) : key_(key), value_(value), quoted_(true) {}
  LogField(std::string_view key, bool value) : key_(key), value_(value ? "true" : "false") {}
  LogField(std::string_view key, double value);
  template <std::integral T>
  LogField(std::string_view key, T value) : key_(key), value_(std::to_string(value)) {}

  std::string_view key() const { return key_; }
  std::string_view value() const { return value_; }
  // A string, as opposed to a number or a boolean.
  bool quoted() const { return quoted_; }

 private:
  std::string_view key_;  // must live until the call that logs it has returned: a literal
  std::string value_;
  bool quoted_ = false;
};
using LogFields = std::initializer_list<LogField>;

// Once, first thing in main and before other threads log. Without it: text, info and above. Lines
// go to stderr, each in one write.
void InitLogging(const LoggingOptions& options);

// Ask before building costly fields.
bool LogEnabled(LogLevel level);

// Thread safe; blocks as long as stderr does, so nothing per request above debug. Requests are
// named by a field "request_id".
void Log(LogLevel level, std::string_view message, LogFields fields = {});
inline void LogDebug(std::string_view message, LogFields fields = {}) {
  Log(LogLevel::kDebug, message, fields);
}
inline void LogInfo(std::string_view message, LogFields fields = {}) {
  Log(LogLevel::kInfo, message, fields);
}
inline void LogWarning(std::string_view message, LogFields fields = {}) {
  Log(LogLevel::kWarning, message, fields);
}
inline void LogError(std::string_view message, LogFields fields = {}) {
  Log(LogLevel::kError, message, fields);
}

// One line without its newline, as Log would write it at `unix_micros`. For tests.
std::string FormatLogLine(LogFormat format, LogLevel level, std::string_view message,
                          LogFields fields, int64_t unix_micros);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_LOGGING_H_
