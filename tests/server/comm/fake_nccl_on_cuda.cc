#include "tests/server/comm/fake_nccl_on_cuda.h"

#include <functional>
#include <utility>

#include "tests/kernels/cuda/emulated_cuda_runtime.h"

namespace expertmesh {
namespace {

cudaError_t RunAsWork(const std::function<void()>& work) {
  work();
  return cudaSuccess;
}

// Memory is open only while `begin` and `end` run, so the copies are made in `begin` of whoever
// comes last.
void Launch(NcclFunctions::DeviceStream stream, std::function<void()> begin,
            std::function<bool()> is_over, std::function<void()> end) {
  auto* const cuda_stream = static_cast<cudaStream_t>(stream);
  static_cast<void>(
      EnqueueEmulatedWork(cuda_stream, [begin = std::move(begin)] { return RunAsWork(begin); }));
  static_cast<void>(EnqueueEmulatedWork(
      cuda_stream, [end = std::move(end)] { return RunAsWork(end); }, std::move(is_over)));
}

}  // namespace

FakeNcclOnCuda::FakeNcclOnCuda() : nccl_(/*has_all_to_all=*/true, Launch) {}

}  // namespace expertmesh
