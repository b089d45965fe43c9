#include "server/ops/start_thread.h"

#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace expertmesh {

absl::StatusOr<std::thread> StartThread(absl::AnyInvocable<void()> work) {
  try {
    return std::thread(std::move(work));
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot start a thread: ", error.what()));
  }
}

}  // namespace expertmesh
