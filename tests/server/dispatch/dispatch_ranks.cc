#include "tests/server/dispatch/dispatch_ranks.h"

#include <utility>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/comm/in_process_communicator.h"

namespace expertmesh {

struct DispatchRanks::Rank {
  ParallelFor parallel_for{ParallelForOptions{}};
  std::unique_ptr<RowOps> row_ops = *NewCpuRowOps(CpuIsa::kPortable, &parallel_for);
  std::unique_ptr<StepArena> arena;
  std::vector<RowSpan> shard;
  std::vector<std::byte> output;
  std::unique_ptr<DispatchHandle> handle;
  std::unique_ptr<Stream> stream;  // goes before what its work may name
};

DispatchRanks::DispatchRanks(const StepPlan& plan, const Placement& placement, int64_t hidden_size,
                             const std::vector<float>& hidden)
    : plan_(plan),
      placement_(placement),
      hidden_size_(hidden_size),
      hidden_(hidden),
      new_stream_(NewInlineHostStream),
      communicators_(NewInProcessCommunicators(placement.ep_size())) {}

DispatchRanks::DispatchRanks(const StepPlan& plan, const Placement& placement, int64_t hidden_size,
                             const std::vector<float>& hidden,
                             std::vector<std::unique_ptr<Communicator>> communicators)
    : plan_(plan),
      placement_(placement),
      hidden_size_(hidden_size),
      hidden_(hidden),
      new_stream_(NewThreadedHostStream),
      communicators_(std::move(communicators)) {}

void DispatchRanks::Dispatch(int32_t ep_rank, Rank& rank) {
  rank.stream = new_stream_();
  rank.arena = std::make_unique<StepArena>(&memory_);
  const int64_t first = plan_.shard_offsets[ep_rank];
  rank.shard = {{reinterpret_cast<const std::byte*>(hidden_.data() + first * hidden_size_),
                 plan_.shard_offsets[ep_rank + 1] - first}};
  const StepSlice& slice = plan_.slices[ep_rank];
  DispatchContext context;
  context.router = router_;
  context.placement = &placement_;
  context.hidden_size = hidden_size_;
  context.num_local_experts = static_cast<int32_t>(placement_.local_experts(ep_rank).size());
  context.row_ops = rank.row_ops.get();
  context.stream = rank.stream.get();
  context.communicator = communicators_[ep_rank].get();
  context.arena = context.host_arena = rank.arena.get();
  rank.handle =
      *(*FindDispatchStrategy(slice.header.strategy))->Dispatch(slice, rank.shard, context);
}

void DispatchRanks::Compute(int32_t ep_rank, Rank& rank) {
  const ExpertRows rows = *rank.handle->Permute();
  float* const output = reinterpret_cast<float*>(
      *rank.arena->Allocate(rows.num_rows * hidden_size_ * int64_t{sizeof(float)}));
  const auto ffn = [this, ep_rank, rows, output] {
    const auto* input = reinterpret_cast<const float*>(rows.rows);
    const absl::Span<const int32_t> experts = placement_.local_experts(ep_rank);
    for (size_t e = 0; e < experts.size(); ++e) {
      const bool batched = rows.format == ActivationFormat::kBatched;
      const int64_t first =
          batched ? static_cast<int64_t>(e) * rows.max_rows_per_expert : rows.expert_offsets[e];
      const int64_t last = batched ? first + rows.expert_num_tokens[e] : rows.expert_offsets[e + 1];
      for (int64_t i = first * hidden_size_; i < last * hidden_size_; ++i) {
        output[i] = input[i] * static_cast<float>(experts[e] + 1);
      }
    }
    return absl::OkStatus();
  };
  EXPECT_TRUE(rank.stream->Enqueue(ffn).ok());
  EXPECT_TRUE(rank.handle->Combine(output).ok());
}

void DispatchRanks::Finish(int32_t ep_rank, Rank& rank, std::vector<float>* outputs) {
  const DType dtype = plan_.slices[ep_rank].header.output_dtype;
  const int64_t count = plan_.slices[ep_rank].num_source_tokens * hidden_size_;
  const absl::Status status = rank.stream->Wait(absl::Now() + absl::Seconds(60));
  EXPECT_TRUE(status.ok()) << status;
  for (int64_t i = 0; i < count; ++i) {
    outputs->push_back(LoadFloat(rank.output.data(), dtype, i));
  }
}

std::vector<float> DispatchRanks::Run() {
  std::vector<Rank> ranks(placement_.ep_size());
  for (int32_t r = 0; r < placement_.ep_size(); ++r) Dispatch(r, ranks[r]);
  for (int32_t r = 0; r < placement_.ep_size(); ++r) Compute(r, ranks[r]);
  for (int32_t r = 0; r < placement_.ep_size(); ++r) {
    const StepSlice& slice = plan_.slices[r];
    ranks[r].output.resize(slice.num_source_tokens * hidden_size_ *
                           DTypeBytes(slice.header.output_dtype));
    EXPECT_TRUE(ranks[r].handle->Finish(SourceAddend{}, ranks[r].output.data()).ok());
  }
  std::vector<float> outputs;
  for (int32_t r = 0; r < placement_.ep_size(); ++r) Finish(r, ranks[r], &outputs);
  return outputs;
}

}  // namespace expertmesh
