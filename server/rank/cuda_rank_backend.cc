#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/ops/logging.h"
#include "server/rank/rank_backend.h"

namespace expertmesh {
namespace {

class CudaRankBackend : public RankBackend {
 public:
  CudaRankBackend(std::shared_ptr<CudaDevice> device, const ParallelForOptions& threads)
      : device_(std::move(device)), parallel_for_(threads) {
    device_->SetGraphErrorListener([name = device_name()](const absl::Status& error) {
      LogWarning("kernels are launched one by one: no CUDA graphs",
                 {{"device", name}, {"why", error.message()}});
    });
  }

  const char* instruction_set() const override { return device_->instruction_set().c_str(); }
  std::string device_name() const override { return absl::StrCat("cuda:", device_->index()); }
  std::optional<int64_t> device_free_bytes() const override { return device_->free_bytes(); }
  int64_t TakenBytes(int64_t size_bytes) const override { return device_->TakenBytes(size_bytes); }
  absl::Status device_status() const override { return device_->status(); }
  std::function<absl::Status(std::byte*, const std::byte*, int64_t)> copy_bytes() override {
    return [device = device_](std::byte* to, const std::byte* from, int64_t size_bytes) {
      return device->CopyNow(to, from, size_bytes);
    };
  }

  const std::shared_ptr<Allocator>& device_allocator() const override {
    return device_->allocator();
  }
  const std::shared_ptr<Allocator>& host_allocator() const override {
    return device_->pinned_allocator();
  }
  std::unique_ptr<Stream> NewStream() override { return device_->NewStream(); }
  RowOps& row_ops() override { return device_->row_ops(); }

  absl::StatusOr<std::unique_ptr<ExpertKernels>> NewExpertKernels(
      const ExpertLayerShape& shape) override {
    return device_->NewExpertKernels(shape);
  }

  void ForEachLoad(int64_t n, absl::FunctionRef<void(int64_t)> load) override {
    constexpr double kWorthAllThreads = 1e9;
    parallel_for_.Run(n, kWorthAllThreads, [&](int64_t i, int /*worker*/) { load(i); });
  }

 private:
  const std::shared_ptr<CudaDevice> device_;
  ParallelFor parallel_for_;
};

}  // namespace

std::unique_ptr<RankBackend> NewCudaRankBackend(std::shared_ptr<CudaDevice> device,
                                                const ParallelForOptions& threads) {
  return std::make_unique<CudaRankBackend>(std::move(device), threads);
}

}  // namespace expertmesh
