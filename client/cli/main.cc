#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "client/cli/command.h"
#include "client/cli/error_advice.h"
#include "client/expert_client.h"

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
  absl::StrAppend(&text,
                  "\n  expertmesh help <command>   what a command takes\n"
                  "  expertmesh --helpfull       every flag\n\n"
                  "All commands that call a server take --target (default 127.0.0.1:50051).\n");
  return text;
}

const Command* FindCommand(absl::string_view name) {
  for (const Command* command : kCommands) {
    if (name == command->name) return command;
  }
  return nullptr;
}

int Help(absl::string_view name) {
  if (name.empty()) {
    fputs(Overview().c_str(), stdout);
    return 0;
  }
  const Command* command = FindCommand(name);
  if (command == nullptr) {
    fprintf(stderr, "expertmesh: there is no command '%s'\n\n%s", std::string(name).c_str(),
            Overview().c_str());
    return kExitUsage;
  }
  printf("expertmesh %s: %s\n\n%s", command->name, command->summary, command->usage);
  if (command != &kCheckpointCommand) fputs(kConnectionUsage, stdout);
  return 0;
}

// --help, -h and --version wherever they stand, before absl's own, which would print every flag of
// every command.
std::optional<int> HelpOrVersion(int argc, char** argv) {
  absl::string_view name;
  bool help = false;
  for (int i = 1; i < argc; ++i) {
    const absl::string_view word = argv[i];
    if (word == "--version") {
      puts("expertmesh " EXPERTMESH_VERSION);
      return 0;
    }
    help |= word == "--help" || word == "-h" || word == "-help";
    if (name.empty() && !absl::StartsWith(word, "-")) name = word;
  }
  if (!help) return std::nullopt;
  return Help(name);
}

int Main(int argc, char** argv) {
  TuneGrpcBeforeFirstUse();
  if (const std::optional<int> exit_code = HelpOrVersion(argc, argv)) return *exit_code;
  absl::SetProgramUsageMessage(Overview());
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) {
    return absl::StrContains(file, "client/cli/");
  };
  absl::SetFlagsUsageConfig(usage);
  const std::vector<char*> words = absl::ParseCommandLine(argc, argv);
  if (words.size() < 2) {
    fputs(Overview().c_str(), stderr);
    return kExitUsage;
  }
  const absl::string_view name = words[1];
  if (name == "help") return Help(words.size() < 3 ? "" : words[2]);
  const Command* command = FindCommand(name);
  if (command == nullptr || words.size() > 2) {
    if (command == nullptr) {
      fprintf(stderr, "expertmesh: there is no command '%s'\n\n", words[1]);
    } else {
      fprintf(stderr,
              "expertmesh %s: '%s' is one word too many; options are flags (--name=value)\n\n",
              words[1], words[2]);
    }
    fputs(Overview().c_str(), stderr);
    return kExitUsage;
  }
  const absl::Status status = command->run();
  if (status.ok()) return 0;
  fprintf(stderr, "expertmesh %s: %s\n", command->name, ErrorWithAdvice(status).c_str());
  return kExitError;
}

}  // namespace
}  // namespace expertmesh

int main(int argc, char** argv) { return expertmesh::Main(argc, argv); }
