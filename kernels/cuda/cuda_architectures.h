#ifndef EXPERTMESH_KERNELS_CUDA_CUDA_ARCHITECTURES_H_
#define EXPERTMESH_KERNELS_CUDA_CUDA_ARCHITECTURES_H_

#include "absl/strings/string_view.h"

namespace expertmesh {

struct CudaCode {
  bool runs = false;          // there is code for the device
  bool tensor_cores = false;  // and Hopper's tensor core kernels are in it
};

// What a device of this compute capability has of kernels that were compiled for `architectures`,
// CMake's CUDA_ARCHITECTURES separated by commas ("80-real,90a-real"). A pure function: "80-real"
// is code for 8.0 and what followed it as 8.x, "90a-real" for 9.0 alone, and one without "-real"
// (but with no letter) for everything later, too.
CudaCode CudaCodeFor(absl::string_view architectures, int major, int minor);

// What the kernels of this build were compiled for.
absl::string_view CudaArchitecturesOfThisBuild();

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CUDA_CUDA_ARCHITECTURES_H_
