#include "server/dispatch/row_exchange.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"

namespace expertmesh {
namespace {

// Collectives within a step.
constexpr uint32_t kDispatchOperation = 0;
constexpr uint32_t kCombineOperation = 1;

}  // namespace

absl::Status CheckCommunicator(DispatchMode mode, const StepSlice& slice,
                               const DispatchContext& context) {
  if (context.communicator == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(DispatchModeName(mode), " needs a communicator: no epoch has formed"));
  }
  if (context.communicator->ep_size() != slice.ep_size ||
      context.communicator->ep_rank() != slice.ep_rank) {
    return absl::InvalidArgumentError(absl::StrCat(
        "slice: of rank ", slice.ep_rank, " of ", slice.ep_size, ", the communicator is rank ",
        context.communicator->ep_rank(), " of ", context.communicator->ep_size()));
  }
  return absl::OkStatus();
}

RowExchange::Blocks::Blocks(absl::Span<const int64_t> counts, int32_t ep_rank) {
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    if (static_cast<int32_t>(rank) == ep_rank) own_first = total;
    total += counts[rank];
    if (static_cast<int32_t>(rank) == ep_rank) own_last = total;
  }
}

RowExchange::RowExchange(const StepSlice& slice, const DispatchContext& context)
    : slice_(slice),
      context_(context),
      activation_bytes_(DTypeBytes(slice.header.activation_dtype)),
      combine_bytes_(DTypeBytes(slice.header.combine_dtype)) {}

absl::StatusOr<std::unique_ptr<DispatchHandle>> RowExchange::Start(
    const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
    const DispatchContext& context) {
  auto exchange = std::make_unique<RowExchange>(slice, context);
  absl::Status status = exchange->Begin(hidden_states);
  if (status.ok()) return exchange;
  // What was enqueued before the failure names the exchange's memory: the stream keeps it until
  // that has run or was dropped. The error that counts is the first one.
  context.stream->Enqueue([kept = std::move(exchange)] { return absl::OkStatus(); }).IgnoreError();
  return status;
}

absl::Status RowExchange::Begin(absl::Span<const RowSpan> hidden_states) {
  if (absl::Status status = SendRows(hidden_states); !status.ok()) return status;
  absl::StatusOr<Permutation> permutation =
      PlanPermutation(slice_, context_.num_local_experts, context_.format, context_.host_arena);
  if (!permutation.ok()) return permutation.status();
  permutation_ = *permutation;
  return absl::OkStatus();
}

absl::Status RowExchange::SendRows(absl::Span<const RowSpan> hidden_states) {
  sources_.reserve(hidden_states.size() + 1);
  sources_.assign(hidden_states.begin(), hidden_states.end());
  if (context_.communicator == nullptr) return absl::OkStatus();
  return slice_.header.strategy == DispatchMode::kAllGatherReduceScatter ? SendRowsToAll()
                                                                         : SendRowsToOwners();
}

absl::Status RowExchange::SendRowsToOwners() {
  const Blocks sent(slice_.send_counts, slice_.ep_rank);
  const Blocks received(slice_.recv_counts, slice_.ep_rank);
  absl::StatusOr<std::byte*> send = AllocateRows(sent.num_remote(), activation_bytes_);
  if (!send.ok()) return send.status();
  absl::StatusOr<std::byte*> receive = AllocateRows(received.num_remote(), activation_bytes_);
  if (!receive.ok()) return receive.status();
  const absl::Span<const int32_t> send_rows = slice_.send_rows;
  absl::Status status = GatherRows(send_rows.subspan(0, sent.own_first), *send);
  status.Update(GatherRows(send_rows.subspan(sent.own_last),
                           *send + sent.own_first * context_.hidden_size * activation_bytes_));
  if (!status.ok()) return status;
  sources_.push_back({*receive, received.num_remote()});
  return AllToAll(kDispatchOperation, *send, slice_.send_counts, *receive, slice_.recv_counts,
                  activation_bytes_);
}

absl::Status RowExchange::SendRowsToAll() {
  const Blocks gathered(slice_.gather_counts, slice_.ep_rank);
  absl::StatusOr<absl::Span<int32_t>> own_rows =
      context_.host_arena->AllocateSpan<int32_t>(gathered.num_own());
  if (!own_rows.ok()) return own_rows.status();
  int64_t num_rows = 0;
  for (int64_t token = 0; token < slice_.num_source_tokens; ++token) {
    if (slice_.sum_offsets[token + 1] == slice_.sum_offsets[token]) continue;
    (*own_rows)[num_rows++] = static_cast<int32_t>(token);
  }
  absl::StatusOr<std::byte*> send = AllocateRows(gathered.num_own(), activation_bytes_);
  if (!send.ok()) return send.status();
  absl::StatusOr<std::byte*> receive = AllocateRows(gathered.total, activation_bytes_);
  if (!receive.ok()) return receive.status();
  absl::StatusOr<absl::Span<int64_t>> receive_bytes =
      context_.host_arena->AllocateSpan<int64_t>(slice_.ep_size);
  if (!receive_bytes.ok()) return receive_bytes.status();
  for (int32_t rank = 0; rank < slice_.ep_size; ++rank) {
    (*receive_bytes)[rank] = slice_.gather_counts[rank] * context_.hidden_size * activation_bytes_;
  }
  if (absl::Status status = GatherRows(*own_rows, *send); !status.ok()) return status;
  sources_.push_back({*receive, gathered.total});
  AllGatherVParams params;
  params.tag = Tag(kDispatchOperation);
  params.send = *send;
  params.receive = *receive;
  params.receive_bytes = *receive_bytes;
  return context_.communicator->AllGatherV(params, *context_.stream);
}

absl::Status RowExchange::GatherRows(absl::Span<const int32_t> rows, std::byte* output) {
  if (rows.empty()) return absl::OkStatus();
  GatherRowsParams params;
  params.sources = sources_;
  params.hidden_size = context_.hidden_size;
  params.dtype = slice_.header.activation_dtype;
  params.row_indices = rows;
  params.output = output;
  return context_.row_ops->GatherRows(params, *context_.stream);
}

absl::StatusOr<ExpertRows> RowExchange::Permute() {
  absl::StatusOr<std::byte*> rows = AllocateRows(permutation_.num_rows, activation_bytes_);
  if (!rows.ok()) return rows.status();
  if (!permutation_.source_rows.empty()) {
    GatherRowsParams params;
    params.sources = sources_;
    params.hidden_size = context_.hidden_size;
    params.dtype = slice_.header.activation_dtype;
    params.row_indices = permutation_.source_rows;
    params.weights = permutation_.weights;
    params.destination_indices = permutation_.destination_rows;
    params.output = *rows;
    absl::Status status = context_.row_ops->GatherRows(params, *context_.stream);
    if (!status.ok()) return status;
  }
  ExpertRows expert_rows;
  expert_rows.format = context_.format;
  expert_rows.rows = *rows;
  expert_rows.num_rows = permutation_.num_rows;
  if (context_.format == ActivationFormat::kContiguous) {
    expert_rows.expert_offsets = permutation_.expert_offsets;
  } else {
    expert_rows.expert_num_tokens = permutation_.expert_num_tokens;
    expert_rows.max_rows_per_expert = permutation_.max_rows_per_expert;
  }
  return expert_rows;
}

absl::Status RowExchange::Combine(const float* expert_output) {
  absl::StatusOr<PartialSums> sums = PlanPartialSums(slice_, permutation_, context_.host_arena);
  if (!sums.ok()) return sums.status();
  const Blocks sent(slice_.return_send_counts, slice_.ep_rank);
  const Blocks returned(slice_.return_recv_counts, slice_.ep_rank);
  absl::StatusOr<std::byte*> returned_rows = AllocateRows(returned.total, combine_bytes_);
  if (!returned_rows.ok()) return returned_rows.status();
  returned_ = *returned_rows;
  const int64_t row_bytes = context_.hidden_size * combine_bytes_;
  absl::Status status = ComputePartials(*sums, sent.own_first, sent.own_last, slice_, expert_output,
                                        returned_ + returned.num_remote() * row_bytes, context_);
  if (!status.ok() || context_.communicator == nullptr) return status;

  absl::StatusOr<std::byte*> send = AllocateRows(sent.num_remote(), combine_bytes_);
  if (!send.ok()) return send.status();
  status = ComputePartials(*sums, 0, sent.own_first, slice_, expert_output, *send, context_);
  status.Update(ComputePartials(*sums, sent.own_last, sent.total, slice_, expert_output,
                                *send + sent.own_first * row_bytes, context_));
  if (!status.ok()) return status;
  return AllToAll(kCombineOperation, *send, slice_.return_send_counts, returned_,
                  slice_.return_recv_counts, combine_bytes_);
}

absl::Status RowExchange::Finish(const SourceAddend& addend, std::byte* output) {
  return SumReturned(slice_, returned_, addend, output, context_);
}

absl::StatusOr<std::byte*> RowExchange::AllocateRows(int64_t num_rows, int64_t element_bytes) {
  const std::optional<int64_t> size_bytes =
      CheckedSizeProduct({num_rows, context_.hidden_size, element_bytes});
  if (!size_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(num_rows, " rows of ", context_.hidden_size,
                                                     " elements do not fit any memory"));
  }
  return context_.arena->Allocate(*size_bytes);
}

absl::StatusOr<absl::Span<const int64_t>> RowExchange::RemoteBytes(absl::Span<const int64_t> counts,
                                                                   int64_t element_bytes) {
  absl::StatusOr<absl::Span<int64_t>> bytes =
      context_.host_arena->AllocateSpan<int64_t>(slice_.ep_size);
  if (!bytes.ok()) return bytes.status();
  for (int32_t rank = 0; rank < slice_.ep_size; ++rank) {
    (*bytes)[rank] =
        rank == slice_.ep_rank ? 0 : counts[rank] * context_.hidden_size * element_bytes;
  }
  return *bytes;
}

CollectiveTag RowExchange::Tag(uint32_t operation) const {
  const StepHeader& header = slice_.header;
  return {header.incarnation, header.epoch, header.step, operation,
          operation == kCombineOperation ? header.combine_order : header.dispatch_order};
}

absl::Status RowExchange::AllToAll(uint32_t operation, const std::byte* send,
                                   absl::Span<const int64_t> send_counts, std::byte* receive,
                                   absl::Span<const int64_t> receive_counts,
                                   int64_t element_bytes) {
  absl::StatusOr<absl::Span<const int64_t>> send_bytes = RemoteBytes(send_counts, element_bytes);
  if (!send_bytes.ok()) return send_bytes.status();
  absl::StatusOr<absl::Span<const int64_t>> receive_bytes =
      RemoteBytes(receive_counts, element_bytes);
  if (!receive_bytes.ok()) return receive_bytes.status();
  AllToAllVParams params;
  params.tag = Tag(operation);
  params.send = send;
  params.send_bytes = *send_bytes;
  params.receive = receive;
  params.receive_bytes = *receive_bytes;
  return context_.communicator->AllToAllV(params, *context_.stream);
}

}  // namespace expertmesh
