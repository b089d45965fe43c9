#include "server/cluster/direct_step.h"

#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/step_arena.h"
#include "kernels/base/stream.h"
#include "server/rank/output_memory.h"

namespace expertmesh {
namespace {

int64_t NowMicros() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

DirectStep::DirectStep(std::shared_ptr<Allocator> allocator)
    : allocator_(std::move(allocator)), parallel_for_(ParallelForOptions{.num_threads = 1}) {}

absl::StatusOr<std::unique_ptr<DirectStep>> DirectStep::Create(
    CpuIsa isa, std::shared_ptr<Allocator> allocator) {
  std::unique_ptr<DirectStep> direct(new DirectStep(std::move(allocator)));
  absl::StatusOr<std::unique_ptr<RowOps>> row_ops = NewCpuRowOps(isa, &direct->parallel_for_);
  if (!row_ops.ok()) return row_ops.status();
  direct->row_ops_ = *std::move(row_ops);
  return direct;
}

absl::Status DirectStep::Scatter(int64_t hidden_size, GroupStep& step) const {
  const DirectSource& source = *step.plan.direct;
  const int64_t row_bytes =
      hidden_size * DTypeBytes(step.plan.slices.front().header.activation_dtype);
  const TokenShard tokens = std::move(step.shards[0]);
  // The span that each token lies in.
  std::vector<size_t> span_of_token;
  std::vector<int64_t> first_token;
  for (size_t i = 0; i < tokens.rows.size(); ++i) {
    const RowSpan& span = tokens.rows[i];
    if (span.num_rows < 0 || (span.num_rows > 0 && span.data == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat("shard: a span of ", span.num_rows, " rows without data"));
    }
    first_token.push_back(static_cast<int64_t>(span_of_token.size()));
    span_of_token.insert(span_of_token.end(), span.num_rows, i);
  }
  const int64_t num_tokens = static_cast<int64_t>(source.sum_offsets.size()) - 1;
  if (static_cast<int64_t>(span_of_token.size()) != num_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("shard: ", span_of_token.size(),
                                                   " rows, the step has ", num_tokens, " tokens"));
  }
  int64_t row = 0;
  for (size_t rank = 0; rank < step.shards.size(); ++rank) {
    TokenShard& shard = step.shards[rank];
    shard = {};
    for (const int64_t end = row + source.send_counts[rank]; row < end; ++row) {
      const int32_t token = source.send_rows[row];
      const size_t span = span_of_token[token];
      const std::byte* const data =
          tokens.rows[span].data + (token - first_token[span]) * row_bytes;
      const std::shared_ptr<const void> owner =
          span < tokens.owners.size() ? tokens.owners[span] : nullptr;
      if (!shard.rows.empty() && shard.owners.back() == owner &&
          shard.rows.back().data + shard.rows.back().num_rows * row_bytes == data) {
        ++shard.rows.back().num_rows;
        continue;
      }
      shard.rows.push_back({data, 1});
      shard.owners.push_back(owner);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<GroupStepResult> DirectStep::Combine(const DirectSource& source, DType combine_dtype,
                                                    int64_t hidden_size, GroupStepResult partials) {
  const int64_t begun = NowMicros();
  const int64_t num_tokens = static_cast<int64_t>(source.sum_offsets.size()) - 1;
  const int64_t partial_bytes = hidden_size * DTypeBytes(combine_dtype);
  int64_t num_partials = 0;
  for (size_t rank = 0; rank < partials.shards.size(); ++rank) {
    if (partials.shards[rank].num_rows != source.return_counts[rank]) {
      return absl::InternalError(absl::StrCat("rank ", rank, " gave ",
                                              partials.shards[rank].num_rows, " partials for ",
                                              source.return_counts[rank]));
    }
    num_partials += source.return_counts[rank];
  }
  // One block by ascending rank, as the plan numbers them.
  StepArena arena(allocator_.get());
  absl::StatusOr<std::byte*> returned =
      AllocateRows(arena, num_partials, hidden_size, combine_dtype);
  if (!returned.ok()) return returned.status();
  std::byte* end = *returned;
  for (const ShardOutput& shard : partials.shards) {
    if (shard.num_rows == 0) continue;
    std::memcpy(end, shard.rows, static_cast<size_t>(shard.num_rows * partial_bytes));
    end += shard.num_rows * partial_bytes;
  }
  absl::StatusOr<ShardOutput> output =
      AllocateOutput(allocator_, num_tokens, hidden_size, source.output_dtype);
  if (!output.ok()) return output.status();
  if (num_tokens > 0) {
    SumRowsParams params;
    params.rows = *returned;
    params.rows_dtype = combine_dtype;
    params.hidden_size = hidden_size;
    params.offsets = source.sum_offsets;
    params.row_indices = source.sum_rows;
    params.weights = source.sum_weights;
    params.output = const_cast<std::byte*>(output->rows);
    params.output_dtype = source.output_dtype;
    const std::unique_ptr<Stream> stream = NewInlineHostStream();
    absl::Status status = row_ops_->SumRows(params, *stream);
    if (status.ok()) status = stream->Wait(absl::InfiniteFuture());
    if (!status.ok()) return status;
  }
  GroupStepResult result;
  result.timings = partials.timings;
  result.timings.combine_micros += NowMicros() - begun;
  result.shards.resize(partials.shards.size());
  result.shards[0] = *std::move(output);
  return result;
}

}  // namespace expertmesh
