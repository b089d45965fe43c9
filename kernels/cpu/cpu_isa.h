#ifndef EXPERTMESH_KERNELS_CPU_CPU_ISA_H_
#define EXPERTMESH_KERNELS_CPU_CPU_ISA_H_

#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/isa_table_plain.h"

namespace expertmesh {

// FAILED_PRECONDITION for an instruction set that this machine lacks.
absl::StatusOr<const IsaTable*> IsaTableFor(CpuIsa isa);

// The table whether or not this machine can run it; null when this build has no code for it. Chosen
// by CMake: one file for x86-64, one for all other machines.
const IsaTable* BuiltIsaTable(CpuIsa isa);
// Whether this machine, its operating system included, has what BuiltIsaTable(isa) was compiled
// for.
bool MachineSupports(CpuIsa isa);

// `dtype` is float32, float16 or bfloat16.
ElementType ElementTypeOf(DType dtype);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CPU_CPU_ISA_H_
