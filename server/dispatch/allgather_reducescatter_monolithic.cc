#include "server/dispatch/allgather_reducescatter_monolithic.h"

#include <cstring>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/checked_math.h"
#include "server/dispatch/row_exchange.h"
#include "server/planning/monolithic_plan.h"

namespace expertmesh {
namespace {

int64_t NumLogits(const LayerSpec& layer) {
  return int64_t{layer.num_experts} + layer.router.num_zero_experts;
}

// Gathers, routes and plans; from then on it is the other form's exchange.
class MonolithicExchange : public DispatchHandle {
 public:
  MonolithicExchange(const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
                     const DispatchContext& context)
      : slice_(slice),
        hidden_states_(hidden_states),
        context_(context),
        row_bytes_(context.hidden_size * DTypeBytes(slice.header.activation_dtype)),
        logits_bytes_(NumLogits(context.router->layer()) * int64_t{sizeof(float)}),
        num_tokens_(
            std::accumulate(slice.gather_counts.begin(), slice.gather_counts.end(), int64_t{0})),
        lists_(context.arena, context.host_arena) {}

  absl::Status Begin();

  absl::StatusOr<ExpertRows> Permute() override {
    if (absl::Status status = PlanOwnSlice(); !status.ok()) return status;
    exchange_.emplace(own_slice_, context_);
    absl::Status status = exchange_->BeginGathered(hidden_states_, gathered_);
    if (!status.ok()) return status;
    return exchange_->Permute();
  }
  absl::Status Combine(const float* expert_output) override {
    return exchange_->Combine(expert_output);
  }
  absl::Status Finish(const SourceAddend& addend, std::byte* output) override {
    return exchange_->Finish(addend, output);
  }

 private:
  absl::StatusOr<std::byte*> AllocateBlocks(int64_t num_tokens) const;
  absl::StatusOr<std::byte*> MakeOwnBlock();
  // On the host.
  absl::StatusOr<const std::byte*> Logits(int32_t rank) const;
  absl::Status PlanOwnSlice();

  const StepSlice& slice_;
  const absl::Span<const RowSpan> hidden_states_;
  const DispatchContext context_;
  const int64_t row_bytes_;        // of one token
  const int64_t logits_bytes_;     // of one token
  const int64_t num_tokens_;       // of all ranks
  std::vector<RowSpan> gathered_;  // [ep_size]; behind each its tokens' logits
  StepLists lists_;
  StepSlice own_slice_;
  std::optional<RowExchange> exchange_;
};

absl::StatusOr<std::byte*> MonolithicExchange::AllocateBlocks(int64_t num_tokens) const {
  const std::optional<int64_t> size_bytes =
      CheckedSizeProduct({num_tokens, row_bytes_ + logits_bytes_});
  if (!size_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        num_tokens, " rows of ", row_bytes_ + logits_bytes_, " bytes do not fit any memory"));
  }
  return context_.arena->Allocate(*size_bytes);
}

absl::StatusOr<std::byte*> MonolithicExchange::MakeOwnBlock() {
  const int64_t num_tokens = slice_.num_source_tokens;
  absl::StatusOr<std::byte*> block = AllocateBlocks(num_tokens);
  if (!block.ok() || num_tokens == 0) return block;
  absl::StatusOr<absl::Span<int32_t>> rows = context_.host_arena->AllocateSpan<int32_t>(num_tokens);
  if (!rows.ok()) return rows.status();
  std::iota(rows->begin(), rows->end(), 0);
  lists_.Add(*rows);
  absl::Status status = lists_.Send(*context_.stream);
  if (!status.ok()) return status;
  GatherRowsParams params;
  params.sources = hidden_states_;
  params.hidden_size = context_.hidden_size;
  params.dtype = slice_.header.activation_dtype;
  params.row_indices = *rows;
  params.output = *block;
  params.lists = &lists_;
  status = context_.row_ops->GatherRows(params, *context_.stream);
  if (!status.ok()) return status;
  const int64_t size_bytes = num_tokens * logits_bytes_;
  const void* logits = slice_.router_logits.data();
  if (context_.stream->device() != Device{}) {
    // A device that copies from memory that is not pinned makes the thread wait for the stream.
    absl::StatusOr<std::byte*> pinned = context_.host_arena->Allocate(size_bytes);
    if (!pinned.ok()) return pinned.status();
    std::memcpy(*pinned, logits, static_cast<size_t>(size_bytes));
    logits = *pinned;
  }
  status = context_.stream->Copy(*block + num_tokens * row_bytes_, logits, size_bytes);
  if (!status.ok()) return status;
  return block;
}

absl::Status MonolithicExchange::Begin() {
  absl::StatusOr<std::byte*> send = MakeOwnBlock();
  if (!send.ok()) return send.status();
  absl::StatusOr<std::byte*> receive = AllocateBlocks(num_tokens_);
  if (!receive.ok()) return receive.status();
  absl::StatusOr<absl::Span<int64_t>> receive_bytes =
      context_.host_arena->AllocateSpan<int64_t>(slice_.ep_size);
  if (!receive_bytes.ok()) return receive_bytes.status();
  std::byte* block = *receive;
  for (int32_t rank = 0; rank < slice_.ep_size; ++rank) {
    gathered_.push_back({block, slice_.gather_counts[rank]});
    (*receive_bytes)[rank] = slice_.gather_counts[rank] * (row_bytes_ + logits_bytes_);
    block += (*receive_bytes)[rank];
  }
  AllGatherVParams params;
  params.tag = {slice_.header.incarnation, slice_.header.epoch, slice_.header.step,
                kDispatchOperation, slice_.header.dispatch_order};
  params.send = *send;
  params.receive = *receive;
  params.receive_bytes = *receive_bytes;
  return context_.communicator->AllGatherV(params, *context_.stream);
}

absl::StatusOr<const std::byte*> MonolithicExchange::Logits(int32_t rank) const {
  const RowSpan& block = gathered_[rank];
  const std::byte* const logits = block.data + block.num_rows * row_bytes_;
  if (context_.stream->device() == Device{}) return logits;
  const int64_t size_bytes = block.num_rows * logits_bytes_;
  absl::StatusOr<std::byte*> copy = context_.host_arena->Allocate(size_bytes);
  if (!copy.ok()) return copy.status();
  absl::Status status = context_.stream->Copy(*copy, logits, size_bytes);
  if (status.ok()) status = context_.stream->Wait(absl::InfiniteFuture());
  if (!status.ok()) return status;
  return *copy;
}

absl::Status MonolithicExchange::PlanOwnSlice() {
  if (absl::Status status = context_.stream->Wait(absl::InfiniteFuture()); !status.ok()) {
    return status;
  }
  const int32_t topk = context_.router->layer().topk;
  std::vector<int32_t> ids(num_tokens_ * topk);
  std::vector<float> weights(ids.size());
  int64_t pair = 0;
  for (int32_t rank = 0; rank < slice_.ep_size; ++rank) {
    const int64_t num_pairs = slice_.gather_counts[rank] * topk;
    absl::StatusOr<const std::byte*> logits = Logits(rank);
    if (!logits.ok()) return logits.status();
    absl::Status status =
        context_.router->RouteLogits(*logits, DType::kFloat32, slice_.gather_counts[rank],
                                     absl::MakeSpan(ids).subspan(pair, num_pairs),
                                     absl::MakeSpan(weights).subspan(pair, num_pairs));
    if (!status.ok()) return status;
    pair += num_pairs;
  }
  absl::StatusOr<StepSlice> own = PlanGatheredSlice(
      slice_, {ids.data(), weights.data(), num_tokens_, topk}, *context_.placement);
  if (!own.ok()) return own.status();
  own_slice_ = *std::move(own);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<DispatchHandle>> AllGatherReduceScatterMonolithicStrategy::Dispatch(
    const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
    const DispatchContext& context) const {
  if (absl::Status status = CheckCommunicator(mode(), slice, context); !status.ok()) return status;
  if (context.router == nullptr || context.placement == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(DispatchModeName(mode()), " needs the layer's router on the rank"));
  }
  const std::optional<int64_t> num_logits =
      CheckedSizeProduct({slice.num_source_tokens, NumLogits(context.router->layer())});
  if (!num_logits || static_cast<int64_t>(slice.router_logits.size()) != *num_logits) {
    return absl::InvalidArgumentError(absl::StrCat(
        "slice.router_logits: ", slice.router_logits.size(), " for ", slice.num_source_tokens,
        " tokens and ", NumLogits(context.router->layer()), " logits each"));
  }
  auto exchange = std::make_unique<MonolithicExchange>(slice, hidden_states, context);
  absl::Status status = exchange->Begin();
  if (status.ok()) return exchange;
  // As RowExchange::Start: the stream keeps what its work names.
  context.stream->Enqueue([kept = std::move(exchange)] { return absl::OkStatus(); }).IgnoreError();
  return status;
}

}  // namespace expertmesh
