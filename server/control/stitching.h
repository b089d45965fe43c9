#ifndef EXPERTMESH_SERVER_CONTROL_STITCHING_H_
#define EXPERTMESH_SERVER_CONTROL_STITCHING_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/control/pending_call.h"
#include "server/rank/token_shard.h"

namespace expertmesh {

// The step's tokens, in the order of the pieces, as one list of rows per rank: rank r gets tokens
// [shard_offsets[r], shard_offsets[r + 1]). Rows stay where they are, in the calls' buffers.
std::vector<TokenShard> CutShards(absl::Span<const StepPiece> pieces,
                                  absl::Span<const int64_t> shard_offsets);

// The shards that outputs are held by. Thread safe.
class HeldOutputs {
 public:
  explicit HeldOutputs(int64_t max_shared_bytes) : max_shared_bytes_(max_shared_bytes) {}

  // Of shards: all their rows, for as long as anyone holds one of them.
  int64_t bytes() const { return bytes_->load(std::memory_order_relaxed); }
  // So much is held that rows should rather be copied than keep a shard alive.
  bool spent() const { return bytes() >= max_shared_bytes_; }
  std::shared_ptr<const void> Hold(const ShardOutput& shard, int64_t shard_bytes);

 private:
  const int64_t max_shared_bytes_;
  // The holders may outlive this.
  const std::shared_ptr<std::atomic<int64_t>> bytes_ = std::make_shared<std::atomic<int64_t>>(0);
};

// The way back: appends to each piece's call->result.output its rows of `shards`, which the spans
// keep alive; neighbours in memory become one span. Less than a quarter of a shard is copied if it
// is little, or if `held` is spent: answers that nobody reads must not hold many times their size.
// INTERNAL, with nothing appended, when the shards have not the rows that the offsets say.
absl::Status StitchOutputs(absl::Span<const StepPiece> pieces,
                           absl::Span<const int64_t> shard_offsets,
                           absl::Span<const ShardOutput> shards, HeldOutputs& held);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_CONTROL_STITCHING_H_
