#include "client/cli/flag_error.h"

#include "absl/strings/cord.h"

namespace expertmesh {
namespace {

constexpr char kFlagErrorUrl[] = "expertmesh/flag_error";

}  // namespace

absl::Status FlagError(absl::string_view message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kFlagErrorUrl, absl::Cord());
  return status;
}

bool IsFlagError(const absl::Status& status) {
  return status.GetPayload(kFlagErrorUrl).has_value();
}

}  // namespace expertmesh
