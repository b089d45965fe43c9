#ifndef EXPERTMESH_KERNELS_CPU_CPU_KERNELS_H_
#define EXPERTMESH_KERNELS_CPU_CPU_KERNELS_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/parallel_for.h"
#include "kernels/expert_kernels.h"
#include "kernels/row_ops.h"

namespace expertmesh {

enum class CpuIsa : uint8_t {
  kPortable,    // baseline x86-64 or any other CPU
  kAvx2,        // AVX2, FMA, F16C
  kAvx512Bf16,  // AVX-512 F/BW/VL/DQ and BF16
};

// What this machine can run, best last.
std::vector<CpuIsa> SupportedCpuIsas();
const char* CpuIsaName(CpuIsa isa);

// `parallel_for` must outlive the result. RESOURCE_EXHAUSTED when the weights do not fit,
// INVALID_ARGUMENT for a shape or dtype that is not supported, FAILED_PRECONDITION for an
// instruction set that this machine lacks.
absl::StatusOr<std::unique_ptr<ExpertKernels>> NewCpuExpertKernels(const ExpertLayerShape& shape,
                                                                   CpuIsa isa,
                                                                   ParallelFor* parallel_for);
absl::StatusOr<std::unique_ptr<RowOps>> NewCpuRowOps(CpuIsa isa, ParallelFor* parallel_for);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CPU_CPU_KERNELS_H_
