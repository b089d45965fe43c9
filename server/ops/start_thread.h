#ifndef EXPERTMESH_SERVER_OPS_START_THREAD_H_
#define EXPERTMESH_SERVER_OPS_START_THREAD_H_

#include <thread>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

namespace expertmesh {

// A thread that runs `work`. RESOURCE_EXHAUSTED where the system gives no more of them (a container
// has a limit), for which std::thread throws. `work` is gone then.
absl::StatusOr<std::thread> StartThread(absl::AnyInvocable<void()> work);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_OPS_START_THREAD_H_
