#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/cli/command.h"
#include "client/cli/error_advice.h"
#include "client/cli/flag_error.h"
#include "client/cli/standard_output.h"
#include "client/expert_client.h"
#include "server/ops/command_line.h"

namespace expertmesh {
namespace {

constexpr int kExitError = 1;
constexpr int kExitUsage = 2;

constexpr char kConnectionUsage[] =
    "\nConnection:\n"
    "  --target=HOST:PORT (127.0.0.1:50051)  --timeout=30s  --max_attempts=4\n"
    "  --tls_ca=FILE [--tls_cert=FILE --tls_key=FILE]\n";

const Command* const kCommands[] = {&kStatusCommand,  &kForwardCommand, &kModelCommand,
                                    &kExplainCommand, &kBenchCommand,   &kCheckpointCommand};

std::string Overview() {
  std::string text =
      "expertmesh: talks to an ExpertMesh service.\n\nusage: expertmesh <command> [flags]\n\n";
  for (const Command* command : kCommands) {
    absl::StrAppendFormat(&text, "  %-12s %s\n", command->name, command->summary);
  }
  absl::StrAppend(
      &text,
      "\n  expertmesh help <command>   what a command takes\n"
      "  expertmesh --helpfull       every flag\n\n"
      "All commands that call a server take --target (default 127.0.0.1:50051).\n"
      "Times have a unit: 500ms, 10s, 2m.\n\n"
      "Exit codes: 0 done; 2 the command line is wrong, whatever files, disk and server are like;\n"
      "1 it failed for any other reason: a file or folder that is not there or cannot be written,\n"
      "a full disk, what the server refuses, a --check that fails.\n");
  return text;
}

const Command* FindCommand(absl::string_view name) {
  for (const Command* command : kCommands) {
    if (name == command->name) return command;
  }
  return nullptr;
}

int NoSuchCommand(absl::string_view name) {
  std::vector<std::string> known;
  for (const Command* command : kCommands) known.emplace_back(command->name);
  const std::string closest = ClosestName(std::string(name), known);
  fprintf(stderr, "expertmesh: there is no command '%s'%s\n\n%s", std::string(name).c_str(),
          closest.empty() ? "" : absl::StrCat("; did you mean ", closest, "?").c_str(),
          Overview().c_str());
  return kExitUsage;
}

int Help(absl::string_view name) {
  if (name.empty()) {
    fputs(Overview().c_str(), stdout);
    return 0;
  }
  const Command* command = FindCommand(name);
  if (command == nullptr) return NoSuchCommand(name);
  printf("expertmesh %s: %s\n\n%s", command->name, command->summary, command->usage);
  if (command != &kCheckpointCommand) fputs(kConnectionUsage, stdout);
  return 0;
}

// Whether `command` reads the flag; one that it would ignore is a mistake.
bool Takes(const Command& command, const std::string& name) {
  const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  for (const absl::string_view taken : absl::StrSplit(command.takes, ' ')) {
    if (taken == name || absl::EndsWith(flag->Filename(), absl::StrCat("/", taken))) return true;
  }
  return false;
}

int UsageError(absl::string_view command, absl::string_view message) {
  fprintf(stderr, "expertmesh%s: %s\nsee expertmesh help%s\n",
          std::string(command.empty() ? "" : absl::StrCat(" ", command)).c_str(),
          std::string(message).c_str(),
          std::string(command.empty() ? "" : absl::StrCat(" ", command)).c_str());
  return kExitUsage;
}

int Main(const std::vector<std::string>& args) {
  TuneGrpcBeforeFirstUse();
  if (!args.empty() && args.front() == "--helpfull") {
    fputs(DescribeFlags("client/cli/").c_str(), stdout);
    return 0;
  }
  const absl::StatusOr<CommandLine> line = ParseCommandLine(args);
  const std::string name = line.ok() && !line->positionals.empty() ? line->positionals.front() : "";
  if (!line.ok()) {
    const bool has_command = !args.empty() && FindCommand(args.front()) != nullptr;
    return UsageError(has_command ? args.front() : "", line.status().message());
  }
  if (line->version) {
    puts("expertmesh " EXPERTMESH_VERSION);
    return 0;
  }
  if (name == "help" || line->help) {
    const size_t word = name == "help" ? 1 : 0;
    return Help(line->positionals.size() > word ? line->positionals[word] : "");
  }
  if (name.empty()) {
    fputs(Overview().c_str(), stderr);
    return kExitUsage;
  }
  const Command* command = FindCommand(name);
  if (command == nullptr) return NoSuchCommand(name);
  if (line->positionals.size() > 1) {
    return UsageError(name,
                      absl::StrCat("'", line->positionals[1],
                                   "' is one word too many; options are flags (--name=value)"));
  }
  for (const std::string& flag : line->flags) {
    if (!Takes(*command, flag)) {
      return UsageError(name, absl::StrCat("--", flag, " is a flag of other commands"));
    }
  }
  absl::Status status = command->run(line->flags);
  if (status.ok()) status = FlushStandardOutput();
  if (status.ok()) return 0;
  if (IsFlagError(status)) return UsageError(name, status.message());
  fprintf(stderr, "expertmesh %s: %s\n", command->name, ErrorWithAdvice(status).c_str());
  return kExitError;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) {
  return expertmesh::Main(std::vector<std::string>(argv + 1, argv + argc));
}
