#ifndef EXPERTMESH_CLIENT_CLI_WIRE_DTYPE_H_
#define EXPERTMESH_CLIENT_CLI_WIRE_DTYPE_H_

#include "expertmesh/v1/tensor.pb.h"
#include "kernels/base/dtype.h"

namespace expertmesh {

// float32, float16 and bfloat16; anything else is kInvalid or DATA_TYPE_UNSPECIFIED.
DType MemoryDType(v1::DataType dtype);
v1::DataType WireDType(DType dtype);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_WIRE_DTYPE_H_
