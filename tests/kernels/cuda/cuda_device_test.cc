#include "kernels/cuda/cuda_device.h"

#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_architectures.h"
#include "tests/kernels/cuda/emulated_cuda_test.h"

namespace expertmesh {
namespace {

class CudaDeviceTest : public EmulatedCudaTest {};

TEST_F(CudaDeviceTest, RefusesAGpuThatTheBuildHasNoCodeFor) {
  ResetEmulatedCuda({.compute_major = 7, .compute_minor = 5});
  const absl::Status status = OpenCudaDevice(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(),
            "GPU 0 has compute capability 7.5, for which this build has no code: it was configured "
            "with EXPERTMESH_CUDA_ARCHITECTURES=" +
                std::string(CudaArchitecturesOfThisBuild()));
}

TEST_F(CudaDeviceTest, TellsWhetherThereAreTensorCoreKernels) {
  for (const int major : {8, 9, 10}) {
    const CudaCode code = CudaCodeFor(CudaArchitecturesOfThisBuild(), major, 0);
    if (!code.runs) continue;
    ResetEmulatedCuda({.compute_major = major});
    const std::shared_ptr<CudaDevice> device = OpenCudaDevice(0).value();
    EXPECT_EQ(device->instruction_set(), "sm_" + std::to_string(10 * major));
    EXPECT_EQ(device->has_tensor_core_kernels(), code.tensor_cores);
  }
}

}  // namespace
}  // namespace expertmesh
