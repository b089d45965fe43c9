#include "server/control/stitching.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

// Calls visit(piece, first row within the piece's call, rank, first row within the shard, rows) for
// every stretch that lies in one piece and in one shard, in order.
void VisitStretches(
    absl::Span<const StepPiece> pieces, absl::Span<const int64_t> shard_offsets,
    absl::FunctionRef<void(const StepPiece&, int64_t, size_t, int64_t, int64_t)> visit) {
  int64_t token = 0;
  size_t rank = 0;
  for (const StepPiece& piece : pieces) {
    int64_t within = 0;
    while (within < piece.num_tokens) {
      while (token >= shard_offsets[rank + 1]) ++rank;
      const int64_t rows = std::min(piece.num_tokens - within, shard_offsets[rank + 1] - token);
      visit(piece, piece.first_token + within, rank, token - shard_offsets[rank], rows);
      within += rows;
      token += rows;
    }
  }
}

// Copying so much costs no step anything.
constexpr int64_t kLittleBytes = 64 << 10;
// Rows that are less than one part in so many of their shard do not keep it.
constexpr int64_t kLeastPart = 4;

// Null without memory.
std::shared_ptr<const void> Copy(const std::byte* data, int64_t size_bytes) {
  auto* copy =
      static_cast<std::byte*>(::operator new(static_cast<size_t>(size_bytes), std::nothrow));
  if (copy == nullptr) return nullptr;
  std::memcpy(copy, data, static_cast<size_t>(size_bytes));
  return std::shared_ptr<const void>(copy, [](std::byte* bytes) { ::operator delete(bytes); });
}

int64_t RowBytes(const ForwardCall& call, DType dtype) {
  return call.model->hidden_size * DTypeBytes(dtype);
}

}  // namespace

std::vector<TokenShard> CutShards(absl::Span<const StepPiece> pieces,
                                  absl::Span<const int64_t> shard_offsets) {
  std::vector<TokenShard> shards(shard_offsets.size() - 1);
  VisitStretches(
      pieces, shard_offsets,
      [&shards](const StepPiece& piece, int64_t row, size_t rank, int64_t /*shard_row*/,
                int64_t rows) {
        const ForwardCall& call = *piece.call->call;
        shards[rank].rows.push_back(
            {call.hidden_states.data() + row * RowBytes(call, call.activation_dtype), rows});
        shards[rank].owners.push_back(piece.call);
      });
  return shards;
}

std::shared_ptr<const void> HeldOutputs::Hold(const ShardOutput& shard, int64_t shard_bytes) {
  bytes_->fetch_add(shard_bytes, std::memory_order_relaxed);
  return std::shared_ptr<const void>(
      shard.arena.get(), [arena = shard.arena, total = bytes_, shard_bytes](const void*) mutable {
        arena.reset();
        total->fetch_sub(shard_bytes, std::memory_order_relaxed);
      });
}

absl::Status StitchOutputs(absl::Span<const StepPiece> pieces,
                           absl::Span<const int64_t> shard_offsets,
                           absl::Span<const ShardOutput> shards, HeldOutputs& held) {
  if (shards.size() + 1 != shard_offsets.size()) {
    return absl::InternalError(absl::StrCat("a step over ", shard_offsets.size() - 1,
                                            " ranks came back from ", shards.size()));
  }
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    const int64_t expected = shard_offsets[rank + 1] - shard_offsets[rank];
    if (shards[rank].num_rows != expected || (expected > 0 && shards[rank].rows == nullptr)) {
      return absl::InternalError(absl::StrCat("rank ", rank, " gave ", shards[rank].num_rows,
                                              " output rows for ", expected, " tokens"));
    }
  }
  // Before this step's own shards are held.
  const bool copy_all_parts = held.spent();
  std::vector<std::shared_ptr<const void>> holders(shards.size());
  VisitStretches(
      pieces, shard_offsets,
      [&](const StepPiece& piece, int64_t /*row*/, size_t rank, int64_t shard_row, int64_t rows) {
        const ShardOutput& shard = shards[rank];
        const ForwardCall& call = *piece.call->call;
        const int64_t row_bytes = RowBytes(call, call.output_dtype);
        const int64_t size_bytes = rows * row_bytes;
        const std::byte* data = shard.rows + shard_row * row_bytes;
        std::vector<OutputSpan>& output = piece.call->result.output;
        if (rows * kLeastPart < shard.num_rows && (copy_all_parts || size_bytes <= kLittleBytes)) {
          if (std::shared_ptr<const void> copy = Copy(data, size_bytes)) {
            const auto* bytes = static_cast<const std::byte*>(copy.get());
            output.push_back({bytes, size_bytes, std::move(copy)});
            return;
          }
        }
        if (!output.empty() && output.back().owner.get() == shard.arena.get() &&
            output.back().data + output.back().size_bytes == data) {
          output.back().size_bytes += size_bytes;
          return;
        }
        if (holders[rank] == nullptr) {
          holders[rank] = held.Hold(shard, shard.num_rows * row_bytes);
        }
        output.push_back({data, size_bytes, holders[rank]});
      });
  return absl::OkStatus();
}

}  // namespace expertmesh
