#include "server/rpc/wire_enums.h"

namespace expertmesh {

DType DTypeFromWire(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT32:
      return DType::kFloat32;
    case v1::DATA_TYPE_FLOAT16:
      return DType::kFloat16;
    case v1::DATA_TYPE_BFLOAT16:
      return DType::kBFloat16;
    case v1::DATA_TYPE_FLOAT8_E4M3:
      return DType::kFloat8E4M3;
    case v1::DATA_TYPE_INT8:
      return DType::kInt8;
    default:
      return DType::kInvalid;
  }
}

v1::DataType DTypeToWire(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return v1::DATA_TYPE_FLOAT32;
    case DType::kFloat16:
      return v1::DATA_TYPE_FLOAT16;
    case DType::kBFloat16:
      return v1::DATA_TYPE_BFLOAT16;
    case DType::kFloat8E4M3:
      return v1::DATA_TYPE_FLOAT8_E4M3;
    case DType::kInt8:
      return v1::DATA_TYPE_INT8;
    default:
      return v1::DATA_TYPE_UNSPECIFIED;
  }
}

v1::DispatchMode DispatchModeToWire(DispatchMode mode) {
  switch (mode) {
    case DispatchMode::kAuto:
      return v1::DISPATCH_MODE_AUTO;
    case DispatchMode::kPassthrough:
      return v1::DISPATCH_MODE_PASSTHROUGH;
    case DispatchMode::kAllToAll:
      return v1::DISPATCH_MODE_ALL_TO_ALL;
    case DispatchMode::kAllToAllFixedCapacity:
      return v1::DISPATCH_MODE_ALL_TO_ALL_FIXED_CAPACITY;
    case DispatchMode::kAllGatherReduceScatter:
      return v1::DISPATCH_MODE_ALLGATHER_REDUCESCATTER;
    case DispatchMode::kAllGatherReduceScatterMonolithic:
      return v1::DISPATCH_MODE_ALLGATHER_REDUCESCATTER_MONOLITHIC;
    case DispatchMode::kDirect:
      return v1::DISPATCH_MODE_DIRECT;
  }
  return v1::DISPATCH_MODE_UNSPECIFIED;
}

}  // namespace expertmesh
