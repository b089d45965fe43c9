#include "kernels/cpu/cpu_isa.h"

namespace expertmesh {

const IsaTable* BuiltIsaTable(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable:
      return &kPortableIsaTable;
    case CpuIsa::kAvx2:
      return &kAvx2IsaTable;
    case CpuIsa::kAvx512Bf16:
      return &kAvx512Bf16IsaTable;
  }
  return nullptr;
}

// What the compiler flags of the files in CMakeLists.txt let the compiler use, as far as real CPUs
// differ in it.
bool MachineSupports(CpuIsa isa) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  switch (isa) {
    case CpuIsa::kPortable:
      return true;
    case CpuIsa::kAvx2:  // F16C came before AVX2 on all CPUs that have it
      return avx2;
    case CpuIsa::kAvx512Bf16:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni") &&
             __builtin_cpu_supports("avx512bf16");
  }
  return false;
}

}  // namespace expertmesh
