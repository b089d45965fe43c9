#include "kernels/cpu/cpu_isa.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace expertmesh {

std::vector<CpuIsa> SupportedCpuIsas() {
  std::vector<CpuIsa> isas;
  for (const CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512Bf16}) {
    if (BuiltIsaTable(isa) != nullptr && MachineSupports(isa)) isas.push_back(isa);
  }
  return isas;
}

const char* CpuIsaName(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable:
      return "portable";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512Bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

absl::StatusOr<const IsaTable*> IsaTableFor(CpuIsa isa) {
  const IsaTable* table = BuiltIsaTable(isa);
  if (table == nullptr || !MachineSupports(isa)) {
    return absl::FailedPreconditionError(
        absl::StrCat("this machine lacks the instruction set ", CpuIsaName(isa)));
  }
  return table;
}

ElementType ElementTypeOf(DType dtype) {
  if (dtype == DType::kFloat32) return kElementFloat32;
  return dtype == DType::kFloat16 ? kElementFloat16 : kElementBFloat16;
}

}  // namespace expertmesh
