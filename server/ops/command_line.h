#ifndef EXPERTMESH_SERVER_OPS_COMMAND_LINE_H_
#define EXPERTMESH_SERVER_OPS_COMMAND_LINE_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace expertmesh {

// A flag's type for sizes: "4096", "64KiB", "1.5MiB", "2GiB". At least 0.
struct ByteSize {
  int64_t bytes = 0;
};
bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error);
std::string AbslUnparseFlag(ByteSize size);

struct CommandLine {
  bool help = false;                     // --help or -h was there
  bool version = false;                  // --version was there
  std::vector<std::string> flags;        // names of those that were set
  std::vector<std::string> positionals;  // what is no flag
};

// Sets the ABSL_FLAGs that `args` (without the program's name) name: --name=value, --name value,
// --bool, --nobool; after "--" all are positionals. absl's own parser ends the process with 1 and
// a list of every library's flags; this one leaves that to the caller. INVALID_ARGUMENT names the
// flag, its value and what it takes, or the flag that was probably meant. Not thread safe.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args);

// What a flag is of use for.
struct FlagUse {
  const char* flag;
  bool is_used;     // that is asked for
  const char* why;  // it is not, otherwise
};
// Refuses flags that were given (`given` are CommandLine::flags) although nothing would look at
// them: whoever gave them expects something else. INVALID_ARGUMENT "--flag would do nothing: why".
absl::Status CheckFlagsAreUsed(const std::vector<std::string>& given,
                               std::initializer_list<FlagUse> uses);

// Which of `known` was probably meant by `name`; empty: none is close.
std::string ClosestName(const std::string& name, const std::vector<std::string>& known);

// The flags that are defined in source files whose path contains `source`, one paragraph each.
std::string DescribeFlags(std::string_view source);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_COMMAND_LINE_H_
