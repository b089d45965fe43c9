#include "kernels/cuda/cuda_stream.h"

#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cuda_stream_queue.h"

namespace expertmesh {

struct CudaStreamPool::State {
  const int32_t device_index;
  std::mutex mutex;
  std::vector<std::shared_ptr<CudaStreamQueue>> idle;

  explicit State(int32_t index) : device_index(index) {}
};

namespace {

using Operation = CudaStreamQueue::Operation;

class PooledCudaStream : public CudaStream {
 public:
  using GiveBack = absl::AnyInvocable<void(std::shared_ptr<CudaStreamQueue>)>;
  PooledCudaStream(std::shared_ptr<CudaStreamQueue> queue, GiveBack give_back)
      : queue_(std::move(queue)), give_back_(std::move(give_back)) {}
  ~PooledCudaStream() override {
    queue_->Drain();
    give_back_(std::move(queue_));
  }

  Device device() const override { return Device{DeviceType::kCuda, queue_->device_index()}; }
  cudaStream_t cuda_stream() const override { return queue_->cuda_stream(); }

  absl::Status Launch(absl::AnyInvocable<absl::Status(cudaStream_t)> launch) override {
    return queue_->Add({Operation::Kind::kLaunch, std::move(launch), nullptr, Event()});
  }
  absl::Status Enqueue(absl::AnyInvocable<absl::Status()> work) override {
    return queue_->Add({Operation::Kind::kHostWork, nullptr, std::move(work), Event()});
  }
  absl::Status Copy(void* dst, const void* src, int64_t size_bytes) override {
    if (size_bytes < 0) {
      return absl::InvalidArgumentError(absl::StrCat("copy of ", size_bytes, " bytes"));
    }
    if (size_bytes == 0) return absl::OkStatus();
    return Launch([dst, src, size_bytes, device = queue_->device_index()](cudaStream_t stream) {
      return CudaStatus(
          cudaMemcpyAsync(dst, src, static_cast<size_t>(size_bytes), cudaMemcpyDefault, stream),
          absl::StrCat("cudaMemcpyAsync(", size_bytes, ")"), device);
    });
  }
  absl::Status WaitFor(const Event& event) override {
    return queue_->Add({Operation::Kind::kWaitFor, nullptr, nullptr, event});
  }
  absl::Status Record(const Event& event) override {
    return queue_->Add({Operation::Kind::kRecord, nullptr, nullptr, event});
  }
  absl::Status Wait(absl::Time deadline) override { return queue_->Wait(deadline); }
  void ClearError() override { queue_->ClearError(); }

 private:
  std::shared_ptr<CudaStreamQueue> queue_;
  GiveBack give_back_;
};

}  // namespace

CudaStreamPool::CudaStreamPool(int32_t device_index)
    : state_(std::make_shared<State>(device_index)) {}

CudaStreamPool::~CudaStreamPool() = default;

std::unique_ptr<CudaStream> CudaStreamPool::NewStream() {
  std::shared_ptr<CudaStreamQueue> queue;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->idle.empty()) {
      queue = std::move(state_->idle.back());
      state_->idle.pop_back();
    }
  }
  if (queue == nullptr) queue = std::make_shared<CudaStreamQueue>(state_->device_index);
  return std::make_unique<PooledCudaStream>(
      std::move(queue), [state = state_](std::shared_ptr<CudaStreamQueue> returned) {
        if (returned->cuda_stream() == nullptr) return;  // the next one may have more luck
        const std::lock_guard<std::mutex> lock(state->mutex);
        state->idle.push_back(std::move(returned));
      });
}

CudaStream* AsCudaStream(Stream& stream) {
  return stream.device().type == DeviceType::kCuda ? static_cast<CudaStream*>(&stream) : nullptr;
}

}  // namespace expertmesh
