#include "server/ops/command_line.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"

namespace expertmesh {
namespace {

struct ByteUnit {
  const char* suffix;
  int64_t bytes;
};
constexpr ByteUnit kUnits[] = {
    {"GiB", int64_t{1} << 30}, {"MiB", int64_t{1} << 20}, {"KiB", int64_t{1} << 10}, {"B", 1}};

// What a flag of this type takes; empty where only its parser knows.
std::string ValidForm(const absl::CommandLineFlag& flag) {
  if (flag.IsOfType<absl::Duration>()) return "a duration with its unit, e.g. 500ms, 10s or 2m";
  if (flag.IsOfType<ByteSize>()) return "a size, e.g. 4096, 64KiB, 1.5MiB or 2GiB";
  if (flag.IsOfType<bool>()) return "true or false";
  if (flag.IsOfType<double>() || flag.IsOfType<float>()) return "a number";
  if (flag.IsOfType<uint32_t>() || flag.IsOfType<uint64_t>()) return "a whole number from 0 on";
  if (flag.IsOfType<int32_t>() || flag.IsOfType<int64_t>()) return "a whole number";
  return "";
}

absl::Status SetFlag(absl::CommandLineFlag* flag, absl::string_view value) {
  std::string error;
  if (flag->ParseFrom(value, &error)) return absl::OkStatus();
  const std::string form = ValidForm(*flag);
  if (form.empty()) return absl::InvalidArgumentError(error);
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag->Name(), " is '", value, "'; it takes ", form));
}

// Insertions, deletions and replacements that make `a` into `b`.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row[b.size()];
}

absl::Status NoSuchFlag(absl::string_view name) {
  std::vector<std::string> known;
  for (const auto& [other, flag] : absl::GetAllFlags()) known.emplace_back(other);
  const std::string closest = ClosestName(std::string(name), known);
  return absl::InvalidArgumentError(
      absl::StrCat("there is no flag --", name,
                   closest.empty() ? "" : absl::StrCat("; did you mean --", closest, "?")));
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
    *error = "not a size";
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
        return absl::InvalidArgumentError(
            absl::StrCat("--", name, " has no value; it takes ",
                         ValidForm(*flag).empty() ? "one" : ValidForm(*flag)));
      }
    }
    if (flag == nullptr) return NoSuchFlag(name);
    const absl::Status status = SetFlag(flag, value);
    if (!status.ok()) return status;
    result.flags.emplace_back(flag->Name());
  }
  return result;
}

absl::Status CheckFlagsAreUsed(const std::vector<std::string>& given,
                               std::initializer_list<FlagUse> uses) {
  for (const FlagUse& use : uses) {
    if (use.is_used || std::find(given.begin(), given.end(), use.flag) == given.end()) continue;
    return absl::InvalidArgumentError(absl::StrCat("--", use.flag, " would do nothing: ", use.why));
  }
  return absl::OkStatus();
}

std::string ClosestName(const std::string& name, const std::vector<std::string>& known) {
  std::string closest;
  // As many typing errors as a short word can have and still be meant.
  size_t best = std::min<size_t>(3, name.size() / 2 + 1);
  for (const std::string& other : known) {
    const size_t distance = EditDistance(name, other);
    if (distance >= best) continue;
    best = distance;
    closest = other;
  }
  return closest;
}

std::string DescribeFlags(std::string_view source) {
  std::map<std::string, absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (absl::StrContains(flag->Filename(), absl::string_view(source.data(), source.size()))) {
      flags.emplace(std::string(name), flag);
    }
  }
  std::string text;
  bool has_durations = false;
  for (const auto& [name, flag] : flags) {
    has_durations |= flag->IsOfType<absl::Duration>();
    const std::string preset = flag->DefaultValue();
    absl::StrAppend(&text, "  --", name, preset.empty() ? "" : absl::StrCat("=", preset),
                    "\n      ", flag->Help(), "\n");
  }
  if (has_durations) absl::StrAppend(&text, "Times have a unit: 500ms, 10s, 2m.\n");
  return text;
}

}  // namespace expertmesh
