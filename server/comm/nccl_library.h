#ifndef EXPERTMESH_SERVER_COMM_NCCL_LIBRARY_H_
#define EXPERTMESH_SERVER_COMM_NCCL_LIBRARY_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/comm/nccl_functions.h"

namespace expertmesh {

// Opens NCCL's library, which no program is linked with: it is larger than all else together, and
// most machines have one already (PyTorch's will do). `path` is a file; empty: libnccl.so.2 where
// the loader finds it, else where deploy/install_deps.sh puts it. FAILED_PRECONDITION when there is
// none, or one that is too old (before 2.18) or for CUDA without what is needed; the message says
// where was looked. Device functions are CUDA's runtime.
absl::StatusOr<std::shared_ptr<NcclFunctions>> OpenNcclLibrary(const std::string& path);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_NCCL_LIBRARY_H_
