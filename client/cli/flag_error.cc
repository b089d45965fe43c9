#include "client/cli/flag_error.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

constexpr char kFlagErrorUrl[] = "expertmesh/flag_error";

}  // namespace

absl::Status FlagError(absl::string_view message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kFlagErrorUrl, absl::Cord());
  return status;
}

absl::Status FlagErrorOf(const absl::Status& status) {
  return status.ok() ? status : FlagError(status.message());
}

bool IsFlagError(const absl::Status& status) {
  return status.GetPayload(kFlagErrorUrl).has_value();
}

absl::Status OfFlag(absl::string_view flag, const absl::Status& status) {
  if (status.ok()) return status;
  const std::string message = absl::StrCat("--", flag, ": ", status.message());
  return IsFlagError(status) ? FlagError(message) : absl::Status(status.code(), message);
}

}  // namespace expertmesh
