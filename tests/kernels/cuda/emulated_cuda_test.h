#ifndef EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_CUDA_TEST_H_
#define EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_CUDA_TEST_H_

#include "gtest/gtest.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"

namespace expertmesh {

// Starts with a new emulated device and leaves one behind, whatever the test broke; what the test
// holds of it must be gone by then (members of derived fixtures are).
class EmulatedCudaTest : public testing::Test {
 protected:
  explicit EmulatedCudaTest(const EmulatedCudaOptions& options = {}) { ResetEmulatedCuda(options); }
  ~EmulatedCudaTest() override { ResetEmulatedCuda(); }
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_KERNELS_CUDA_EMULATED_CUDA_TEST_H_
