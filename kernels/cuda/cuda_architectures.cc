#include "kernels/cuda/cuda_architectures.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace expertmesh {

CudaCode CudaCodeFor(absl::string_view architectures, int major, int minor) {
  CudaCode code;
  for (absl::string_view entry : absl::StrSplit(architectures, ',', absl::SkipWhitespace())) {
    const bool has_machine_code = !absl::ConsumeSuffix(&entry, "-virtual");
    const bool is_forward = !absl::ConsumeSuffix(&entry, "-real");
    const bool is_specific = absl::ConsumeSuffix(&entry, "a");
    int number = 0;
    if (!absl::SimpleAtoi(entry, &number)) continue;
    const int device = 10 * major + minor;
    const bool is_exact = device == number;
    const bool is_same_major = major == number / 10 && device >= number;
    if (is_specific) {
      code.runs = code.runs || is_exact;
      code.tensor_cores = code.tensor_cores || (is_exact && number == 90);
    } else {
      code.runs =
          code.runs || (has_machine_code && is_same_major) || (is_forward && device >= number);
    }
  }
  return code;
}

absl::string_view CudaArchitecturesOfThisBuild() { return EXPERTMESH_CUDA_ARCHITECTURES; }

}  // namespace expertmesh
