#include "kernels/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/steady_now.h"
#include "kernels/cuda/cuda_allocator.h"
#include "kernels/cuda/cuda_architectures.h"
#include "kernels/cuda/cuda_expert_kernels.h"
#include "kernels/cuda/cuda_row_ops.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cuda_stream.h"

namespace expertmesh {
namespace {

// A device that has not copied a block by then never will.
constexpr absl::Duration kCopyTimeout = absl::Minutes(2);

class OneCudaDevice : public CudaDevice {
 public:
  OneCudaDevice(int32_t index, const CudaDeviceOptions& options, std::string instruction_set,
                bool has_tensor_core_kernels)
      : index_(index),
        options_(options),
        instruction_set_(std::move(instruction_set)),
        has_tensor_core_kernels_(has_tensor_core_kernels) {}

  int32_t index() const override { return index_; }
  const std::string& instruction_set() const override { return instruction_set_; }
  bool has_tensor_core_kernels() const override { return has_tensor_core_kernels_; }
  const std::shared_ptr<Allocator>& allocator() const override { return device_memory_; }
  const std::shared_ptr<Allocator>& pinned_allocator() const override { return pinned_memory_; }

  int64_t free_bytes() const override {
    int64_t free_bytes = 0;
    if (!AskFreeBytes(&free_bytes).ok()) return 0;
    return free_bytes + allocators_.device->usage().cached_bytes;
  }

  int64_t TakenBytes(int64_t size_bytes) const override {
    return CudaAllocator::TakenBytes(size_bytes);
  }

  absl::Status status() const override {
    // A lost context makes every call fail; this one changes nothing and waits for nothing.
    int64_t free_bytes = 0;
    return AskFreeBytes(&free_bytes);
  }

  std::unique_ptr<Stream> NewStream() override { return streams_->NewStream(); }
  RowOps& row_ops() override { return *row_ops_; }
  absl::StatusOr<std::unique_ptr<ExpertKernels>> NewExpertKernels(
      const ExpertLayerShape& shape) override {
    return NewCudaExpertKernels(shape, allocators_, streams_, graph_errors_,
                                options_.reserved_multiprocessors);
  }
  void SetGraphErrorListener(std::function<void(const absl::Status&)> listener) override {
    graph_errors_->SetListener(std::move(listener));
  }

  absl::Status CopyNow(std::byte* to, const std::byte* from, int64_t size_bytes) override {
    const std::unique_ptr<CudaStream> stream = streams_->NewStream();
    absl::Status status = stream->Copy(to, from, size_bytes);
    return status.ok() ? stream->Wait(SteadyNow() + kCopyTimeout) : status;
  }

 private:
  absl::Status AskFreeBytes(int64_t* bytes) const {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    absl::Status status = UseCudaDevice(index_);
    if (status.ok()) {
      status = CudaStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo", index_);
    }
    if (status.ok()) *bytes = static_cast<int64_t>(free_bytes);
    return status;
  }

  const int32_t index_;
  const CudaDeviceOptions options_;
  const std::string instruction_set_;
  const bool has_tensor_core_kernels_;
  const CudaAllocators allocators_ = {
      std::make_shared<CudaAllocator>(CudaMemory::kDevice, index_),
      std::make_shared<CudaAllocator>(CudaMemory::kPinnedHost, index_)};
  const std::shared_ptr<Allocator> device_memory_ = allocators_.device;
  const std::shared_ptr<Allocator> pinned_memory_ = allocators_.pinned;
  const std::shared_ptr<CudaStreamPool> streams_ = std::make_shared<CudaStreamPool>(index_);
  const std::shared_ptr<CudaGraphErrors> graph_errors_ = std::make_shared<CudaGraphErrors>();
  const std::unique_ptr<RowOps> row_ops_ = NewCudaRowOps(allocators_);
};

}  // namespace

absl::StatusOr<std::shared_ptr<CudaDevice>> OpenCudaDevice(int32_t index,
                                                           const CudaDeviceOptions& options) {
  if (absl::Status status = CheckCudaDevice(index); !status.ok()) return status;
  const absl::StatusOr<CudaComputeCapability> capability = CudaCapability(index);
  if (!capability.ok()) return capability.status();
  const absl::string_view architectures = CudaArchitecturesOfThisBuild();
  const CudaCode code = CudaCodeFor(architectures, capability->major, capability->minor);
  if (!code.runs) {
    return absl::FailedPreconditionError(absl::StrCat(
        "GPU ", index, " has compute capability ", capability->major, ".", capability->minor,
        ", for which this build has no code: it was configured with "
        "EXPERTMESH_CUDA_ARCHITECTURES=",
        architectures));
  }
  absl::StatusOr<std::string> instruction_set = CudaInstructionSet(index);
  if (!instruction_set.ok()) return instruction_set.status();
  return std::make_shared<OneCudaDevice>(index, options, *std::move(instruction_set),
                                         code.tensor_cores);
}

}  // namespace expertmesh
