#ifndef EXPERTMESH_SERVER_SERVER_PROGRAM_H_
#define EXPERTMESH_SERVER_SERVER_PROGRAM_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/ops/logging.h"

namespace expertmesh {

// What a server's main file has around its flags. Not thread safe.
class ServerProgram {
 public:
  static constexpr int kExitFailure = 1;
  static constexpr int kExitUsage = 2;

  // `usage` is what --help begins with; the flags of `main_file` follow.
  ServerProgram(const char* name, const char* usage, const char* main_file)
      : name_(name), usage_(usage), main_file_(main_file) {}

  // Sets the flags that `args` name, and gives the names. An exit code where nothing is left to do:
  // --help and --version were answered, or what is wrong was said.
  std::optional<int> ReadCommandLine(const std::vector<std::string>& args,
                                     std::vector<std::string>* given) const;

  // Of --log_level and --log_format.
  static absl::StatusOr<LoggingOptions> ParseLogFlags(const std::string& level,
                                                      const std::string& format);

  // Each says what is wrong, and gives the exit code. A start may fail of a flag's value
  // (INVALID_ARGUMENT) or of anything else.
  int UsageError(const absl::Status& status) const;
  int StartError(const absl::Status& status) const;

  // The body of main: runs `run` with what follows the program's name, in a process made ready for
  // gRPC and signals, and ends the process with its exit code.
  static int Main(int argc, char** argv, int (*run)(const std::vector<std::string>& args));

 private:
  const char* const name_;
  const char* const usage_;
  const char* const main_file_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_SERVER_PROGRAM_H_
