#ifndef EXPERTMESH_SERVER_RPC_WIRE_ENUMS_H_
#define EXPERTMESH_SERVER_RPC_WIRE_ENUMS_H_

#include "expertmesh/v1/expert_service.pb.h"
#include "kernels/base/dtype.h"
#include "server/planning/step_plan.h"

namespace expertmesh {

// kInvalid for DATA_TYPE_UNSPECIFIED and numbers that mean nothing (yet).
DType DTypeFromWire(v1::DataType dtype);
v1::DataType DTypeToWire(DType dtype);
v1::DispatchMode DispatchModeToWire(DispatchMode mode);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_WIRE_ENUMS_H_
