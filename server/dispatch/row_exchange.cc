#include "server/dispatch/row_exchange.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"

namespace expertmesh {

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

RowExchange::Blocks::Blocks(absl::Span<const int64_t> counts, int32_t ep_rank, int64_t num_slots) {
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    const bool is_own = static_cast<int32_t>(rank) == ep_rank;
    if (is_own) own_first = num_rows;
    num_rows += counts[rank];
    if (is_own) own_last = num_rows;
    if (!is_own) num_remote_places += num_slots > 0 ? num_slots : counts[rank];
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
  return Plan();
}

absl::Status RowExchange::BeginGathered(absl::Span<const RowSpan> hidden_states,
                                        absl::Span<const RowSpan> gathered) {
  sources_.assign(hidden_states.begin(), hidden_states.end());
  sources_.insert(sources_.end(), gathered.begin(), gathered.end());
  return Plan();
}

absl::Status RowExchange::Plan() {
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
  const int64_t num_slots = slice_.max_num_tokens;
  const Blocks sent(slice_.send_counts, slice_.ep_rank, num_slots);
  const Blocks received(slice_.recv_counts, slice_.ep_rank, num_slots);
  absl::StatusOr<std::byte*> send = AllocateRows(sent.num_remote_places, activation_bytes_);
  if (!send.ok()) return send.status();
  absl::StatusOr<std::byte*> receive = AllocateRows(received.num_remote_places, activation_bytes_);
  if (!receive.ok()) return receive.status();
  if (absl::Status status = GatherRowsToSend(sent, *send); !status.ok()) return status;
  sources_.push_back({*receive, received.num_remote_places});
  return AllToAll(kDispatchOperation, *send, slice_.send_counts, *receive, slice_.recv_counts,
                  num_slots, activation_bytes_);
}

absl::Status RowExchange::GatherRowsToSend(const Blocks& sent, std::byte* buffer) {
  const absl::Span<const int32_t> rows = slice_.send_rows;
  if (slice_.max_num_tokens == 0) {
    absl::Status status = GatherRows(rows.subspan(0, sent.own_first), {}, buffer);
    status.Update(GatherRows(rows.subspan(sent.own_last), {},
                             buffer + sent.own_first * context_.hidden_size * activation_bytes_));
    return status;
  }
  absl::StatusOr<absl::Span<int64_t>> places =
      context_.host_arena->AllocateSpan<int64_t>(sent.num_rows);
  if (!places.ok()) return places.status();
  int64_t row = 0;
  int64_t block = 0;
  for (int32_t rank = 0; rank < slice_.ep_size; ++rank) {
    for (int64_t i = 0; i < slice_.send_counts[rank]; ++i) (*places)[row++] = block + i;
    if (rank != slice_.ep_rank) block += slice_.max_num_tokens;
  }
  absl::Status status =
      GatherRows(rows.subspan(0, sent.own_first), places->subspan(0, sent.own_first), buffer);
  status.Update(GatherRows(rows.subspan(sent.own_last), places->subspan(sent.own_last), buffer));
  return status;
}

absl::Status RowExchange::SendRowsToAll() {
  const Blocks gathered(slice_.gather_counts, slice_.ep_rank, 0);
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
  absl::StatusOr<std::byte*> receive = AllocateRows(gathered.num_rows, activation_bytes_);
  if (!receive.ok()) return receive.status();
  absl::StatusOr<absl::Span<int64_t>> receive_bytes =
      context_.host_arena->AllocateSpan<int64_t>(slice_.ep_size);
  if (!receive_bytes.ok()) return receive_bytes.status();
  for (int32_t rank = 0; rank < slice_.ep_size; ++rank) {
    (*receive_bytes)[rank] = slice_.gather_counts[rank] * context_.hidden_size * activation_bytes_;
  }
  if (absl::Status status = GatherRows(*own_rows, {}, *send); !status.ok()) return status;
  sources_.push_back({*receive, gathered.num_rows});
  AllGatherVParams params;
  params.tag = Tag(kDispatchOperation);
  params.send = *send;
  params.receive = *receive;
  params.receive_bytes = *receive_bytes;
  return context_.communicator->AllGatherV(params, *context_.stream);
}

absl::Status RowExchange::GatherRows(absl::Span<const int32_t> rows,
                                     absl::Span<const int64_t> destinations, std::byte* output) {
  if (rows.empty()) return absl::OkStatus();
  GatherRowsParams params;
  params.sources = sources_;
  params.hidden_size = context_.hidden_size;
  params.dtype = slice_.header.activation_dtype;
  params.row_indices = rows;
  params.destination_indices = destinations;
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
  const int64_t num_slots = slice_.max_return_rows();
  const Blocks sent(slice_.return_send_counts, slice_.ep_rank, num_slots);
  const Blocks returned(slice_.return_recv_counts, slice_.ep_rank, num_slots);
  absl::StatusOr<std::byte*> returned_rows =
      AllocateRows(returned.num_remote_places + returned.num_own(), combine_bytes_);
  if (!returned_rows.ok()) return returned_rows.status();
  returned_ = *returned_rows;
  const int64_t row_bytes = context_.hidden_size * combine_bytes_;
  absl::Status status =
      ComputePartials(*sums, sent.own_first, sent.own_last, slice_, expert_output,
                      returned_ + returned.num_remote_places * row_bytes, context_);
  if (!status.ok() || context_.communicator == nullptr) return status;

  absl::StatusOr<std::byte*> send = AllocateRows(sent.num_remote_places, combine_bytes_);
  if (!send.ok()) return send.status();
  status = ComputePartialsToSend(*sums, sent, expert_output, *send);
  if (!status.ok()) return status;
  return AllToAll(kCombineOperation, *send, slice_.return_send_counts, returned_,
                  slice_.return_recv_counts, num_slots, combine_bytes_);
}

absl::Status RowExchange::ComputePartialsToSend(const PartialSums& sums, const Blocks& sent,
                                                const float* expert_output, std::byte* buffer) {
  const int64_t row_bytes = context_.hidden_size * combine_bytes_;
  const int64_t num_slots = slice_.max_return_rows();
  if (slice_.max_num_tokens == 0) {
    absl::Status status =
        ComputePartials(sums, 0, sent.own_first, slice_, expert_output, buffer, context_);
    status.Update(ComputePartials(sums, sent.own_last, sent.num_rows, slice_, expert_output,
                                  buffer + sent.own_first * row_bytes, context_));
    return status;
  }
  int64_t row = 0;
  for (int32_t rank = 0; rank < slice_.ep_size; ++rank) {
    const int64_t first = row;
    row += slice_.return_send_counts[rank];
    if (rank == slice_.ep_rank) continue;
    absl::Status status =
        ComputePartials(sums, first, row, slice_, expert_output, buffer, context_);
    if (!status.ok()) return status;
    buffer += num_slots * row_bytes;
  }
  return absl::OkStatus();
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
                                                                   int64_t num_slots,
                                                                   int64_t element_bytes) {
  absl::StatusOr<absl::Span<int64_t>> bytes =
      context_.host_arena->AllocateSpan<int64_t>(slice_.ep_size);
  if (!bytes.ok()) return bytes.status();
  for (int32_t rank = 0; rank < slice_.ep_size; ++rank) {
    const int64_t num_rows = num_slots > 0 ? num_slots : counts[rank];
    (*bytes)[rank] = rank == slice_.ep_rank ? 0 : num_rows * context_.hidden_size * element_bytes;
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
                                   absl::Span<const int64_t> receive_counts, int64_t num_slots,
                                   int64_t element_bytes) {
  absl::StatusOr<absl::Span<const int64_t>> send_bytes =
      RemoteBytes(send_counts, num_slots, element_bytes);
  if (!send_bytes.ok()) return send_bytes.status();
  absl::StatusOr<absl::Span<const int64_t>> receive_bytes =
      RemoteBytes(receive_counts, num_slots, element_bytes);
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
