#include "server/ops/logging.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace expertmesh {
namespace {

struct LevelRow {
  LogLevel level;
  char letter;
  const char* name;
  spdlog::level::level_enum spdlog_level;
};
constexpr LevelRow kLevels[] = {
    {LogLevel::kDebug, 'D', "debug", spdlog::level::debug},
    {LogLevel::kInfo, 'I', "info", spdlog::level::info},
    {LogLevel::kWarning, 'W', "warning", spdlog::level::warn},
    {LogLevel::kError, 'E', "error", spdlog::level::err},
};

const LevelRow& RowOf(LogLevel level) { return kLevels[static_cast<int>(level)]; }

std::atomic<LogLevel> min_level{LogLevel::kInfo};
std::atomic<LogFormat> line_format{LogFormat::kText};

// Leaked: threads may log while the process exits.
spdlog::logger& Logger() {
  static spdlog::logger* const logger = [] {
    auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    auto* made = new spdlog::logger("expertmesh", std::move(sink));
    made->set_pattern("%v");
    made->set_level(spdlog::level::trace);
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *logger;
}

// Invalid UTF-8 becomes U+FFFD; control characters are escaped.
std::string JsonString(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

bool NeedsQuotes(std::string_view text) {
  if (text.empty()) return true;
  for (const unsigned char c : text) {
    if (c <= ' ' || c == '"' || c == '\\' || c == '=' || c >= 0x7f) return true;
  }
  return false;
}

// Messages are our own words, but they may quote what came from outside.
std::string OneLine(std::string_view text) {
  std::string quoted = JsonString(text);
  bool has_control = false;
  for (const unsigned char c : text) has_control |= c < ' ';
  return has_control ? quoted : std::string(text);
}

std::string FormatTime(int64_t unix_micros, const char* strftime_format, const char* suffix) {
  const std::time_t seconds = static_cast<std::time_t>(unix_micros / 1'000'000);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[32];
  std::strftime(text, sizeof(text), strftime_format, &utc);
  return absl::StrFormat("%s.%06d%s", text, unix_micros % 1'000'000, suffix);
}

}  // namespace

LogField::LogField(std::string_view key, double value)
    : key_(key), value_(absl::StrCat(value)), quoted_(!std::isfinite(value)) {}

absl::StatusOr<LogLevel> ParseLogLevel(std::string_view name) {
  for (const LevelRow& row : kLevels) {
    if (name == row.name) return row.level;
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("log level '%s' is not one of debug, info, warning, error", name));
}

absl::StatusOr<LogFormat> ParseLogFormat(std::string_view name) {
  if (name == "text") return LogFormat::kText;
  if (name == "json") return LogFormat::kJson;
  return absl::InvalidArgumentError(
      absl::StrFormat("log format '%s' is not one of text, json", name));
}

void InitLogging(const LoggingOptions& options) {
  min_level.store(options.level, std::memory_order_relaxed);
  line_format.store(options.format, std::memory_order_relaxed);
}

bool LogEnabled(LogLevel level) { return level >= min_level.load(std::memory_order_relaxed); }

std::string FormatLogLine(LogFormat format, LogLevel level, std::string_view message,
                          LogFields fields, int64_t unix_micros) {
  if (format == LogFormat::kJson) {
    std::string line =
        absl::StrCat("{\"time\":\"", FormatTime(unix_micros, "%Y-%m-%dT%H:%M:%S", "Z"),
                     "\",\"level\":\"", RowOf(level).name, "\",\"message\":", JsonString(message));
    for (const LogField& field : fields) {
      absl::StrAppend(&line, ",", JsonString(field.key()), ":",
                      field.quoted() ? JsonString(field.value()) : std::string(field.value()));
    }
    line += '}';
    return line;
  }
  std::string line = absl::StrFormat("%s %c %s", FormatTime(unix_micros, "%Y-%m-%d %H:%M:%S", ""),
                                     RowOf(level).letter, OneLine(message));
  for (const LogField& field : fields) {
    const bool escape = field.quoted() && NeedsQuotes(field.value());
    absl::StrAppendFormat(&line, " %s=%s", field.key(),
                          escape ? JsonString(field.value()) : std::string(field.value()));
  }
  return line;
}

void Log(LogLevel level, std::string_view message, LogFields fields) {
  if (!LogEnabled(level)) return;
  const int64_t now = std::chrono::duration_cast<std::chrono::microseconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
  const std::string line =
      FormatLogLine(line_format.load(std::memory_order_relaxed), level, message, fields, now);
  Logger().log(RowOf(level).spdlog_level, spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace expertmesh
