#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cli/command.h"
#include "client/cli/connection_flags.h"
#include "client/cli/error_advice.h"
#include "client/cli/flag_error.h"
#include "client/cli/json_output.h"
#include "client/cli/standard_output.h"
#include "client/cli/status_text.h"

ABSL_FLAG(absl::Duration, watch, absl::ZeroDuration(),
          "status: print again every so often, e.g. 500ms or 2s, until Ctrl-C");

namespace expertmesh {
namespace {

// Draws one frame after another: over the one before on a terminal, below it elsewhere.
class Frames {
 public:
  explicit Frames(absl::Duration interval)
      : is_watching_(interval > absl::ZeroDuration()),
        is_terminal_(isatty(STDOUT_FILENO) != 0),
        title_(absl::StrCat("every ", absl::FormatDuration(interval), " until Ctrl-C, ")) {}

  void Show(const std::string& text) {
    std::string frame;
    if (is_watching_) {
      const std::string now = absl::FormatTime("%H:%M:%S", absl::Now(), absl::LocalTimeZone());
      // Home, each line's rest and all that is below erased: nothing flickers.
      frame = is_terminal_ ? absl::StrCat("\033[H", title_, now, "\n\n", text)
                           : absl::StrCat(is_first_ ? "" : "\n", "---- ", now, "\n", text);
      if (is_terminal_) {
        frame = absl::StrCat(is_first_ ? "\033[2J" : "",
                             absl::StrReplaceAll(frame, {{"\n", "\033[K\n"}}), "\033[J");
      }
    } else {
      frame = text;
    }
    is_first_ = false;
    fwrite(frame.data(), 1, frame.size(), stdout);
  }

 private:
  const bool is_watching_;
  const bool is_terminal_;
  const std::string title_;
  bool is_first_ = true;
};

absl::StatusOr<std::string> StatusOrJsonText(ExpertClient& client) {
  const absl::StatusOr<v1::GetStatusResponse> status = client.GetStatus(CallOptionsFromFlags());
  // A server of ours that does not serve AdminService, or something else.
  if (absl::IsUnimplemented(status.status()) && client.ListModels(CallOptionsFromFlags()).ok()) {
    return absl::FailedPreconditionError(
        "the server at this address tells its status only if it is started with --allow_admin");
  }
  if (!status.ok()) return status.status();
  return JsonWanted() ? JsonText(*status) : StatusText(*status);
}

absl::Status Run(const std::vector<std::string>& /*given*/) {
  const absl::Duration interval = absl::GetFlag(FLAGS_watch);
  if (interval < absl::ZeroDuration() || interval == absl::InfiniteDuration()) {
    return FlagError(absl::StrCat("--watch is ", absl::FormatDuration(interval),
                                  "; it takes a time between two tables, e.g. 500ms or 2s"));
  }
  absl::StatusOr<std::unique_ptr<ExpertClient>> client = ClientFromFlags();
  if (!client.ok()) return client.status();
  // JSON is for programs.
  Frames frames(JsonWanted() ? absl::ZeroDuration() : interval);
  for (bool is_first = true;; is_first = false) {
    const absl::StatusOr<std::string> text = StatusOrJsonText(**client);
    if (text.ok()) {
      frames.Show(*text);
    } else if (is_first || interval <= absl::ZeroDuration()) {
      return text.status();
    } else if (JsonWanted()) {
      fprintf(stderr, "%s\n", ErrorWithAdvice(text.status()).c_str());
    } else {
      // A control plane that is restarted is part of what one watches.
      frames.Show(ErrorWithAdvice(text.status()) + "\n");
    }
    if (absl::Status status = FlushStandardOutput(); !status.ok()) return status;
    if (interval <= absl::ZeroDuration()) return absl::OkStatus();
    absl::SleepFor(interval);
  }
}

}  // namespace

const Command kStatusCommand = {
    "status",
    "what a server is doing: epoch, ranks, steps, queue, balance (--allow_admin on the server)",
    "  --watch=2s   again every so often (a time with its unit), until Ctrl-C\n"
    "  --json       as JSON\n\n"
    "  expertmesh status\n",
    "status_command.cc json_output.cc connection_flags.cc", Run};

}  // namespace expertmesh
