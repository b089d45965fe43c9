#include "server/ops/command_line.h"

#include <cmath>
#include <map>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace expertmesh {
namespace {

struct ByteUnit {
  const char* suffix;
  int64_t bytes;
};
constexpr ByteUnit kUnits[] = {
    {"GiB", int64_t{1} << 30}, {"MiB", int64_t{1} << 20}, {"KiB", int64_t{1} << 10}, {"B", 1}};

absl::Status SetFlag(absl::CommandLineFlag* flag, absl::string_view value) {
  std::string error;
  if (flag->ParseFrom(value, &error)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(error));
}

}  // namespace

bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error) {
  int64_t unit_bytes = 1;
  absl::string_view number = text;
  for (const ByteUnit& unit : kUnits) {
    if (absl::ConsumeSuffix(&number, unit.suffix)) {
      unit_bytes = unit.bytes;
      break;
    }
  }
  double count = 0;
  if (!absl::SimpleAtod(number, &count) || !(count >= 0) ||
      count * static_cast<double>(unit_bytes) > 9e18) {
    *error = "expected a size such as 4096, 64KiB, 1.5MiB or 2GiB";
    return false;
  }
  size->bytes = static_cast<int64_t>(count * static_cast<double>(unit_bytes));
  return true;
}

std::string AbslUnparseFlag(ByteSize size) {
  for (const ByteUnit& unit : kUnits) {
    if (unit.bytes > 1 && size.bytes >= unit.bytes && size.bytes % unit.bytes == 0) {
      return absl::StrCat(size.bytes / unit.bytes, unit.suffix);
    }
  }
  return absl::StrCat(size.bytes);
}

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args) {
  CommandLine result;
  for (size_t i = 0; i < args.size(); ++i) {
    absl::string_view text = args[i];
    if (text == "--") {
      result.positionals.insert(result.positionals.end(), args.begin() + static_cast<long>(i) + 1,
                                args.end());
      break;
    }
    if (text == "-h" || text == "--help" || text == "-help") {
      result.help = true;
      continue;
    }
    if (text == "--version") {
      result.version = true;
      continue;
    }
    if (!absl::ConsumePrefix(&text, "--") &&
        (text.size() < 2 || !absl::ConsumePrefix(&text, "-"))) {
      result.positionals.push_back(args[i]);
      continue;
    }
    const size_t equals = text.find('=');
    const bool has_value = equals != absl::string_view::npos;
    const absl::string_view name = text.substr(0, equals);
    absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    absl::string_view value = has_value ? text.substr(equals + 1) : absl::string_view();
    if (flag == nullptr && absl::StartsWith(name, "no") && !has_value) {
      flag = absl::FindCommandLineFlag(name.substr(2));
      if (flag != nullptr && !flag->IsOfType<bool>()) flag = nullptr;
      value = "false";
    } else if (flag != nullptr && !has_value) {
      if (flag->IsOfType<bool>()) {
        value = "true";
      } else if (i + 1 < args.size()) {
        value = args[++i];
      } else {
        return absl::InvalidArgumentError(absl::StrCat("flag --", name, " needs a value"));
      }
    }
    if (flag == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("there is no flag --", name));
    }
    const absl::Status status = SetFlag(flag, value);
    if (!status.ok()) return status;
  }
  return result;
}

std::string DescribeFlags(std::string_view source) {
  std::map<std::string, absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (absl::StrContains(flag->Filename(), absl::string_view(source.data(), source.size()))) {
      flags.emplace(std::string(name), flag);
    }
  }
  std::string text;
  for (const auto& [name, flag] : flags) {
    const std::string preset = flag->DefaultValue();
    absl::StrAppend(&text, "  --", name, preset.empty() ? "" : absl::StrCat("=", preset),
                    "\n      ", flag->Help(), "\n");
  }
  return text;
}

}  // namespace expertmesh
