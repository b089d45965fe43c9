#include "server/control/stitching.h"

#include <algorithm>

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

absl::Status StitchOutputs(absl::Span<const StepPiece> pieces,
                           absl::Span<const int64_t> shard_offsets,
                           absl::Span<const ShardOutput> shards) {
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
  VisitStretches(pieces, shard_offsets,
                 [&shards](const StepPiece& piece, int64_t /*row*/, size_t rank, int64_t shard_row,
                           int64_t rows) {
                   const ForwardCall& call = *piece.call->call;
                   const int64_t row_bytes = RowBytes(call, call.output_dtype);
                   const std::byte* data = shards[rank].rows + shard_row * row_bytes;
                   std::vector<OutputSpan>& output = piece.call->result.output;
                   if (!output.empty() && output.back().owner == shards[rank].arena &&
                       output.back().data + output.back().size_bytes == data) {
                     output.back().size_bytes += rows * row_bytes;
                   } else {
                     output.push_back({data, rows * row_bytes, shards[rank].arena});
                   }
                 });
  return absl::OkStatus();
}

}  // namespace expertmesh
