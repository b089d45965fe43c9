#ifndef EXPERTMESH_KERNELS_BASE_STREAM_OPERATION_H_
#define EXPERTMESH_KERNELS_BASE_STREAM_OPERATION_H_

#include <cstdint>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/stream.h"

namespace expertmesh {

// One entry in the queue of a host stream.
struct StreamOperation {
  enum class Kind : uint8_t { kWork, kWaitFor, kRecord };
  Kind kind;
  absl::AnyInvocable<absl::Status()> work;  // kWork
  Event event;                              // kWaitFor, kRecord
};

// INVALID_ARGUMENT for a negative size.
absl::StatusOr<StreamOperation> HostCopyOperation(void* dst, const void* src, int64_t size_bytes);

// Runs `operation`, keeping the stream's first error in `error`: with an error set, work and waits
// are dropped and events are signalled with it. A kWaitFor event must be done.
void RunOperation(StreamOperation& operation, absl::Status& error);

// For what a stream leaves behind when it is destroyed: a recorded event is signalled CANCELLED.
void CancelOperation(StreamOperation& operation);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_BASE_STREAM_OPERATION_H_
