#include "tests/server/rank/fake_device_backend.h"

#include <utility>

#include "kernels/base/host_buffer_pool.h"

namespace expertmesh {
namespace {

class FakeDeviceBackend : public RankBackend {
 public:
  explicit FakeDeviceBackend(std::shared_ptr<FakeDevice> device)
      : device_(std::move(device)),
        device_allocator_(device_),
        host_allocator_(
            std::make_shared<HostBufferPool>(HostBufferPoolOptions{.poison_byte = 0xff})),
        row_ops_(*NewCpuRowOps(CpuIsa::kPortable, &parallel_for_)) {}

  const char* instruction_set() const override { return "fake"; }
  const std::shared_ptr<Allocator>& device_allocator() const override { return device_allocator_; }
  const std::shared_ptr<Allocator>& host_allocator() const override { return host_allocator_; }
  std::unique_ptr<Stream> NewStream() override { return device_->NewStream(); }
  RowOps& row_ops() override { return *row_ops_; }
  absl::StatusOr<std::unique_ptr<ExpertKernels>> NewExpertKernels(
      const ExpertLayerShape& shape) override {
    return NewCpuExpertKernels(shape, CpuIsa::kPortable, &parallel_for_);
  }
  void ForEachLoad(int64_t n, absl::FunctionRef<void(int64_t)> load) override {
    for (int64_t i = 0; i < n; ++i) load(i);
  }

 private:
  const std::shared_ptr<FakeDevice> device_;
  const std::shared_ptr<Allocator> device_allocator_;
  const std::shared_ptr<Allocator> host_allocator_;
  ParallelFor parallel_for_{ParallelForOptions{}};
  std::unique_ptr<RowOps> row_ops_;
};

}  // namespace

std::unique_ptr<RankBackend> NewFakeDeviceBackend(std::shared_ptr<FakeDevice> device) {
  return std::make_unique<FakeDeviceBackend>(std::move(device));
}

}  // namespace expertmesh
