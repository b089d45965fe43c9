#ifndef EXPERTMESH_SERVER_MODEL_LOAD_REPORTER_H_
#define EXPERTMESH_SERVER_MODEL_LOAD_REPORTER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace expertmesh {

struct LoadReporterOptions {
  bool is_terminal = false;  // isatty(STDERR_FILENO), as a rule
  int terminal_columns = 80;
  // Gets text as it is, to a terminal: carriage returns and no newline until the load ends.
  std::function<void(std::string_view)> write_terminal;
  // Gets one message, without a newline, for the log.
  std::function<void(std::string_view)> log;
  std::function<absl::Time()> now = absl::Now;
};

// Tells people how loading a model goes: first what it needs and what there is, then a bar on a
// terminal or a log line every few seconds elsewhere, at the end how long it took. Calls must not
// overlap; they may come from different threads. Never blocks but in the callbacks.
class LoadReporter {
 public:
  LoadReporter(LoadReporterOptions options, std::string model_name);

  void Start(int64_t need_bytes, int64_t available_bytes);
  // Cheap: most calls write nothing.
  void Update(int64_t loaded_bytes, int64_t total_bytes);
  // Ends the bar. Once; also after a failure, whose text is for the caller to log.
  void Finish(const absl::Status& status);

  static constexpr absl::Duration kBarInterval = absl::Milliseconds(100);
  static constexpr absl::Duration kLogInterval = absl::Seconds(5);

 private:
  std::string BarLine() const;
  std::string RateText() const;

  LoadReporterOptions options_;
  std::string model_name_;
  absl::Time start_ = absl::InfinitePast();
  absl::Time last_output_ = absl::InfinitePast();
  int64_t loaded_bytes_ = 0;
  int64_t total_bytes_ = 0;
  bool bar_shown_ = false;
};

// "1.50 GiB", "312 MiB", "17 bytes".
std::string BytesText(int64_t size_bytes);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_LOAD_REPORTER_H_
