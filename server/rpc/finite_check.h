#ifndef EXPERTMESH_SERVER_RPC_FINITE_CHECK_H_
#define EXPERTMESH_SERVER_RPC_FINITE_CHECK_H_

#include <cstdint>

#include "kernels/base/dtype.h"

namespace expertmesh {

// Index of the first infinity or NaN among `count` elements of float32, float16 or bfloat16 at
// `data` (may be unaligned), or -1. Bit tests alone, at the speed of memory.
int64_t FirstNonFinite(const void* data, DType dtype, int64_t count);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_FINITE_CHECK_H_
