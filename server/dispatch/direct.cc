#include "server/dispatch/direct.h"

#include "server/dispatch/row_exchange.h"

namespace expertmesh {
namespace {

class DirectExchange : public RowExchange {
 public:
  using RowExchange::RowExchange;

  absl::Status Combine(const float* expert_output) override {
    expert_output_ = expert_output;
    return absl::OkStatus();
  }

  absl::Status Finish(const SourceAddend& /*addend*/, std::byte* output) override {
    return ComputePartials(sums(), slice(), expert_output_, output, context(), lists());
  }

 private:
  const float* expert_output_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DispatchHandle>> DirectStrategy::Dispatch(
    const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
    const DispatchContext& context) const {
  DispatchContext local = context;
  local.communicator = nullptr;
  auto exchange = std::make_unique<DirectExchange>(slice, local);
  if (absl::Status status = exchange->Begin(hidden_states); !status.ok()) return status;
  return exchange;
}

}  // namespace expertmesh
