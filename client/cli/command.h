#ifndef EXPERTMESH_CLIENT_CLI_COMMAND_H_
#define EXPERTMESH_CLIENT_CLI_COMMAND_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace expertmesh {

// One word of `expertmesh <word> [flags]`. Prints its result to stdout; an error is the caller's to
// print.
struct Command {
  const char* name;
  const char* summary;  // one line
  const char* usage;    // flags that matter, and an example
  // What it takes, by spaces: files of client/cli whose flags it takes all of, or single flags.
  const char* takes;
  // `given`: CommandLine::flags.
  absl::Status (*run)(const std::vector<std::string>& given);
};

extern const Command kForwardCommand;
extern const Command kModelCommand;
extern const Command kExplainCommand;
extern const Command kStatusCommand;
extern const Command kBenchCommand;
extern const Command kCheckpointCommand;

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_COMMAND_H_
