#include <utility>

#include "server/rank/rank_backend.h"

namespace expertmesh {
namespace {

class CpuRankBackend : public RankBackend {
 public:
  explicit CpuRankBackend(const CpuRankBackendOptions& options)
      : isa_(options.isa), allocator_(options.allocator), parallel_for_(options.threads) {}

  absl::Status Initialize() {
    absl::StatusOr<std::unique_ptr<RowOps>> row_ops = NewCpuRowOps(isa_, &parallel_for_);
    if (!row_ops.ok()) return row_ops.status();
    row_ops_ = *std::move(row_ops);
    return absl::OkStatus();
  }

  const char* instruction_set() const override { return CpuIsaName(isa_); }
  const std::shared_ptr<Allocator>& device_allocator() const override { return allocator_; }
  const std::shared_ptr<Allocator>& host_allocator() const override { return allocator_; }
  std::unique_ptr<Stream> NewStream() override { return NewInlineHostStream(); }
  RowOps& row_ops() override { return *row_ops_; }

  absl::StatusOr<std::unique_ptr<ExpertKernels>> NewExpertKernels(
      const ExpertLayerShape& shape) override {
    return NewCpuExpertKernels(shape, isa_, &parallel_for_);
  }

  void ForEachLoad(int64_t n, absl::FunctionRef<void(int64_t)> load) override {
    constexpr double kWorthAllThreads = 1e9;
    parallel_for_.Run(n, kWorthAllThreads, [&](int64_t i, int /*worker*/) { load(i); });
  }

 private:
  const CpuIsa isa_;
  const std::shared_ptr<Allocator> allocator_;
  ParallelFor parallel_for_;
  std::unique_ptr<RowOps> row_ops_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RankBackend>> NewCpuRankBackend(
    const CpuRankBackendOptions& options) {
  auto backend = std::make_unique<CpuRankBackend>(options);
  if (absl::Status status = backend->Initialize(); !status.ok()) return status;
  return backend;
}

}  // namespace expertmesh
