#ifndef EXPERTMESH_SERVER_COMM_NCCL_EVENT_POOL_H_
#define EXPERTMESH_SERVER_COMM_NCCL_EVENT_POOL_H_

#include <cstdint>
#include <memory>

#include "kernels/base/handle_pool.h"
#include "server/comm/nccl_functions.h"

namespace expertmesh {

using NcclEventPool = HandlePool<NcclFunctions::DeviceEvent>;

// Of events of one device, which becomes current on a thread whose Take makes one.
std::shared_ptr<NcclEventPool> NewNcclEventPool(std::shared_ptr<NcclFunctions> functions,
                                                int32_t device_index);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_NCCL_EVENT_POOL_H_
