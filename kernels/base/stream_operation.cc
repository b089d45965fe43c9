#include "kernels/base/stream_operation.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace expertmesh {

absl::StatusOr<StreamOperation> HostCopyOperation(void* dst, const void* src, int64_t size_bytes) {
  if (size_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("copy of ", size_bytes, " bytes"));
  }
  return StreamOperation{StreamOperation::Kind::kWork,
                         [dst, src, size_bytes]() -> absl::Status {
                           if (size_bytes > 0) {
                             std::memcpy(dst, src, static_cast<size_t>(size_bytes));
                           }
                           return absl::OkStatus();
                         },
                         Event()};
}

void RunOperation(StreamOperation& operation, absl::Status& error) {
  switch (operation.kind) {
    case StreamOperation::Kind::kWork:
      if (error.ok()) error = operation.work();
      // What the work captured goes here, on the thread that ran it, before anyone is told that it
      // is done.
      operation.work = nullptr;
      break;
    case StreamOperation::Kind::kWaitFor:
      if (error.ok()) error = operation.event.status();
      break;
    case StreamOperation::Kind::kRecord:
      operation.event.Signal(error);
      break;
  }
}

void CancelOperation(StreamOperation& operation) {
  if (operation.kind == StreamOperation::Kind::kRecord) {
    operation.event.Signal(absl::CancelledError("the stream was destroyed first"));
  }
}

}  // namespace expertmesh
