#include "kernels/cpu/cpu_isa.h"

namespace expertmesh {

const IsaTable* BuiltIsaTable(CpuIsa isa) {
  return isa == CpuIsa::kPortable ? &kPortableIsaTable : nullptr;
}

bool MachineSupports(CpuIsa isa) { return isa == CpuIsa::kPortable; }

}  // namespace expertmesh
