#include "client/cli/wire_dtype.h"

namespace expertmesh {
namespace {

constexpr struct {
  DType memory;
  v1::DataType wire;
} kDTypes[] = {{DType::kFloat32, v1::DATA_TYPE_FLOAT32},
               {DType::kFloat16, v1::DATA_TYPE_FLOAT16},
               {DType::kBFloat16, v1::DATA_TYPE_BFLOAT16}};

}  // namespace

DType MemoryDType(v1::DataType dtype) {
  for (const auto& known : kDTypes) {
    if (known.wire == dtype) return known.memory;
  }
  return DType::kInvalid;
}

v1::DataType WireDType(DType dtype) {
  for (const auto& known : kDTypes) {
    if (known.memory == dtype) return known.wire;
  }
  return v1::DATA_TYPE_UNSPECIFIED;
}

}  // namespace expertmesh
