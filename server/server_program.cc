#include "server/server_program.h"

#include <cstdio>
#include <exception>

#include "absl/strings/str_cat.h"
#include "server/ops/command_line.h"
#include "server/ops/stop_signals.h"
#include "server/rpc/grpc_server.h"

namespace expertmesh {

std::optional<int> ServerProgram::ReadCommandLine(const std::vector<std::string>& args,
                                                  std::vector<std::string>* given) const {
  const absl::StatusOr<CommandLine> line = ParseCommandLine(args);
  if (!line.ok()) return UsageError(line.status());
  if (line->help) {
    std::printf("%s%s", usage_, DescribeFlags(main_file_).c_str());
    return 0;
  }
  if (line->version) {
    std::printf("%s %s\n", name_, EXPERTMESH_VERSION);
    return 0;
  }
  if (!line->positionals.empty()) {
    return UsageError(absl::InvalidArgumentError(
        absl::StrCat("'", line->positionals.front(), "' is no flag; flags start with --")));
  }
  *given = line->flags;
  return std::nullopt;
}

absl::StatusOr<LoggingOptions> ServerProgram::ParseLogFlags(const std::string& level,
                                                            const std::string& format) {
  const absl::StatusOr<LogFormat> parsed_format = ParseLogFormat(format);
  if (!parsed_format.ok()) return parsed_format.status();
  const absl::StatusOr<LogLevel> parsed_level = ParseLogLevel(level);
  if (!parsed_level.ok()) return parsed_level.status();
  return LoggingOptions{*parsed_level, *parsed_format};
}

int ServerProgram::UsageError(const absl::Status& status) const {
  std::fprintf(stderr, "%s: %s\nsee %s --help\n", name_, std::string(status.message()).c_str(),
               name_);
  return kExitUsage;
}

int ServerProgram::StartError(const absl::Status& status) const {
  if (absl::IsInvalidArgument(status)) return UsageError(status);
  std::fprintf(stderr, "%s: %s\n", name_, std::string(status.message()).c_str());
  return kExitFailure;
}

int ServerProgram::Main(int argc, char** argv, int (*run)(const std::vector<std::string>& args)) {
  StopSignals::Block();
  TuneProcessForGrpc();
  try {
    ExitWithoutTeardown(run(std::vector<std::string>(argv + 1, argv + argc)));
  } catch (const std::exception& error) {
    // The machine gives no more threads or memory while the process starts.
    std::fprintf(stderr, "%s: cannot go on: %s\n", argv[0], error.what());
    return kExitFailure;
  }
}

}  // namespace expertmesh
