#ifndef EXPERTMESH_TESTS_SERVER_RANK_CUDA_RANK_ENGINE_FIXTURE_H_
#define EXPERTMESH_TESTS_SERVER_RANK_CUDA_RANK_ENGINE_FIXTURE_H_

#include <memory>

#include "kernels/cuda/cuda_device.h"
#include "server/rank/rank_backend.h"
#include "tests/kernels/cuda/test_device.h"
#include "tests/server/rank/rank_engine_fixture.h"

namespace expertmesh {

// Ranks on the test device: a GPU, or the emulated one.
class CudaRankEngineFixture : public RankEngineFixture {
 protected:
  CudaRankEngineFixture() { ResetTestDevice(1); }
  ~CudaRankEngineFixture() override {
    engines_.clear();
    ResetTestDevice(1);
  }

  // One device for all ranks of a group; the group before must be gone.
  static NewBackend OnGpu(uint64_t seed) {
    ResetTestDevice(seed);
    std::shared_ptr<CudaDevice> device = OpenCudaDevice(0).value();
    return [device] { return NewCudaRankBackend(device, ParallelForOptions{}); };
  }
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_RANK_CUDA_RANK_ENGINE_FIXTURE_H_
