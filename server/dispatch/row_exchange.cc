#include "server/dispatch/row_exchange.h"

#include <algorithm>
#include <numeric>
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
      combine_bytes_(DTypeBytes(slice.header.combine_dtype)),
      lists_(context.arena, context.host_arena) {}

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
  sources_.reserve(hidden_states.size() + 1);
  sources_.assign(hidden_states.begin(), hidden_states.end());
  const bool plans_first = PlansFirst();
  absl::Status status = plans_first ? Plan() : absl::OkStatus();
  if (status.ok() && context_.communicator != nullptr) status = SendRows();
  if (status.ok() && !plans_first) status = Plan();
  return status.ok() ? lists_.Send(*context_.stream) : status;
}

absl::Status RowExchange::BeginGathered(absl::Span<const RowSpan> hidden_states,
                                        absl::Span<const RowSpan> gathered) {
  sources_.assign(hidden_states.begin(), hidden_states.end());
  sources_.insert(sources_.end(), gathered.begin(), gathered.end());
  absl::Status status = Plan();
  return status.ok() ? lists_.Send(*context_.stream) : status;
}

bool RowExchange::PlansFirst() const {
  // A device gets all lists with one copy then, which for few pairs is worth more than the time
  // for which the rows wait; those of many leave before it is known what becomes of them.
  constexpr size_t kMaxPairs = 1024;
  return context_.stream->device() != Device{} && slice_.pair_local_expert.size() <= kMaxPairs;
}

absl::Status RowExchange::Plan() {
  absl::StatusOr<Permutation> permutation =
      PlanPermutation(slice_, context_.num_local_experts, context_.format, context_.host_arena);
  if (!permutation.ok()) return permutation.status();
  permutation_ = *permutation;
  absl::StatusOr<PartialSums> sums = PlanPartialSums(slice_, permutation_, context_.host_arena);
  if (!sums.ok()) return sums.status();
  sums_ = *sums;
  const Blocks sent(slice_.return_send_counts, slice_.ep_rank, slice_.max_return_rows());
  if (sent.num_remote_places > 0) {
    if (absl::Status status = PlanDestinations(sent); !status.ok()) return status;
  }
  absl::StatusOr<absl::Span<const int64_t>> sum_rows =
      PlanReturnedRows(slice_, context_.host_arena);
  if (!sum_rows.ok()) return sum_rows.status();
  sum_rows_ = *sum_rows;
  lists_.Add(permutation_.source_rows);
  lists_.Add(permutation_.weights);
  lists_.Add(permutation_.destination_rows);
  lists_.Add(sums_.offsets);
  lists_.Add(sums_.rows);
  lists_.Add(sums_.weights);
  lists_.Add(sums_.destinations);
  lists_.Add(absl::MakeConstSpan(slice_.sum_offsets));
  lists_.Add(sum_rows_);
  lists_.Add(absl::MakeConstSpan(slice_.sum_weights));
  return absl::OkStatus();
}

absl::Status RowExchange::PlanDestinations(const Blocks& sent) {
  absl::StatusOr<absl::Span<int64_t>> destinations =
      context_.host_arena->AllocateSpan<int64_t>(sent.num_rows);
  if (!destinations.ok()) return destinations.status();
  const int64_t num_slots = slice_.max_return_rows();
  auto place = destinations->begin();
  int64_t block = 0;
  for (int32_t rank = 0; rank < slice_.ep_size; ++rank) {
    const int64_t count = slice_.return_send_counts[rank];
    const bool is_own = rank == slice_.ep_rank;
    std::iota(place, place + count, is_own ? sent.num_remote_places : block);
    place += count;
    if (!is_own) block += num_slots > 0 ? num_slots : count;
  }
  sums_.destinations = *destinations;
  return absl::OkStatus();
}

absl::Status RowExchange::SendRows() {
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
  const int64_t num_slots = slice_.max_num_tokens;
  const int64_t num_remote = sent.num_rows - sent.num_own();
  absl::StatusOr<absl::Span<int32_t>> rows = context_.host_arena->AllocateSpan<int32_t>(num_remote);
  if (!rows.ok()) return rows.status();
  absl::StatusOr<absl::Span<int64_t>> places =
      context_.host_arena->AllocateSpan<int64_t>(num_slots > 0 ? num_remote : 0);
  if (!places.ok()) return places.status();
  auto from = slice_.send_rows.begin();
  int64_t row = 0;
  int64_t block = 0;
  for (int32_t rank = 0; rank < slice_.ep_size; ++rank) {
    const int64_t count = slice_.send_counts[rank];
    if (rank != slice_.ep_rank) {
      std::copy_n(from, count, rows->begin() + row);
      if (num_slots > 0) std::iota(places->begin() + row, places->begin() + row + count, block);
      row += count;
      block += num_slots;
    }
    from += count;
  }
  return GatherRowsToSend(*rows, *places, buffer);
}

absl::Status RowExchange::GatherRowsToSend(absl::Span<const int32_t> rows,
                                           absl::Span<const int64_t> destinations,
                                           std::byte* buffer) {
  lists_.Add(rows);
  lists_.Add(destinations);
  if (absl::Status status = lists_.Send(*context_.stream); !status.ok()) return status;
  GatherRowsParams params;
  params.row_indices = rows;
  params.destination_indices = destinations;
  params.output = buffer;
  return GatherRows(params);
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
  if (absl::Status status = GatherRowsToSend(*own_rows, {}, *send); !status.ok()) return status;
  sources_.push_back({*receive, gathered.num_rows});
  AllGatherVParams params;
  params.tag = Tag(kDispatchOperation);
  params.send = *send;
  params.receive = *receive;
  params.receive_bytes = *receive_bytes;
  return context_.communicator->AllGatherV(params, *context_.stream);
}

absl::Status RowExchange::GatherRows(GatherRowsParams params) {
  if (params.row_indices.empty()) return absl::OkStatus();
  params.sources = sources_;
  params.hidden_size = context_.hidden_size;
  params.dtype = slice_.header.activation_dtype;
  params.lists = &lists_;
  return context_.row_ops->GatherRows(params, *context_.stream);
}

absl::StatusOr<ExpertRows> RowExchange::Permute() {
  StepArena* const arena =
      context_.expert_arena != nullptr ? context_.expert_arena : context_.arena;
  absl::StatusOr<std::byte*> rows = AllocateRows(*arena, permutation_.num_rows, activation_bytes_);
  if (!rows.ok()) return rows.status();
  GatherRowsParams params;
  params.row_indices = permutation_.source_rows;
  params.weights = permutation_.weights;
  params.destination_indices = permutation_.destination_rows;
  params.output = *rows;
  if (absl::Status status = GatherRows(params); !status.ok()) return status;
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
  const int64_t num_slots = slice_.max_return_rows();
  const Blocks sent(slice_.return_send_counts, slice_.ep_rank, num_slots);
  const Blocks returned(slice_.return_recv_counts, slice_.ep_rank, num_slots);
  // What is sent, the rank's own, what comes home: so one sum fills the first two, and another one
  // reads the last two.
  absl::StatusOr<std::byte*> partials = AllocateRows(
      sent.num_remote_places + sent.num_own() + returned.num_remote_places, combine_bytes_);
  if (!partials.ok()) return partials.status();
  const int64_t row_bytes = context_.hidden_size * combine_bytes_;
  returned_ = *partials + sent.num_remote_places * row_bytes;
  absl::Status status = ComputePartials(sums_, slice_, expert_output, *partials, context_, lists_);
  if (!status.ok() || context_.communicator == nullptr) return status;
  return AllToAll(kCombineOperation, *partials, slice_.return_send_counts,
                  returned_ + sent.num_own() * row_bytes, slice_.return_recv_counts, num_slots,
                  combine_bytes_);
}

absl::Status RowExchange::Finish(const SourceAddend& addend, std::byte* output) {
  return SumReturned(slice_, sum_rows_, returned_, addend, output, context_, lists_);
}

absl::StatusOr<std::byte*> RowExchange::AllocateRows(int64_t num_rows, int64_t element_bytes) {
  return AllocateRows(*context_.arena, num_rows, element_bytes);
}

absl::StatusOr<std::byte*> RowExchange::AllocateRows(StepArena& arena, int64_t num_rows,
                                                     int64_t element_bytes) {
  const std::optional<int64_t> size_bytes =
      CheckedSizeProduct({num_rows, context_.hidden_size, element_bytes});
  if (!size_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(num_rows, " rows of ", context_.hidden_size,
                                                     " elements do not fit any memory"));
  }
  return arena.Allocate(*size_bytes);
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
