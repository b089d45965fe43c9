#ifndef EXPERTMESH_SERVER_DISPATCH_ROW_EXCHANGE_H_
#define EXPERTMESH_SERVER_DISPATCH_ROW_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/step_lists.h"
#include "server/dispatch/combine.h"
#include "server/dispatch/dispatch_strategy.h"
#include "server/dispatch/permute.h"

namespace expertmesh {

// The collectives of a step.
inline constexpr uint32_t kDispatchOperation = 0;
inline constexpr uint32_t kCombineOperation = 1;

// Whether `context` has the communicator of the slice's rank; errors as DispatchStrategy::Dispatch,
// and INVALID_ARGUMENT for another rank's.
absl::Status CheckCommunicator(DispatchMode mode, const StepSlice& slice,
                               const DispatchContext& context);

// One step of passthrough, all_to_all (both forms) or allgather_reducescatter on one rank; these
// differ in how rows come, and how many travel with them, and in nothing else. Rows for experts of
// the rank itself never enter a send buffer: they are gathered from the shard straight into their
// places, and their partials are written straight to where the sum reads them. So with one rank
// nothing is left of the exchange, and passthrough is this class without a communicator.
class RowExchange : public DispatchHandle {
 public:
  RowExchange(const StepSlice& slice, const DispatchContext& context);

  // First phase. Without a communicator in the context all rows must be the rank's own.
  absl::Status Begin(absl::Span<const RowSpan> hidden_states);
  // Instead of it, where everybody's rows are here already: `gathered`, in the step's order.
  absl::Status BeginGathered(absl::Span<const RowSpan> hidden_states,
                             absl::Span<const RowSpan> gathered);
  // As Begin, for a new one.
  static absl::StatusOr<std::unique_ptr<DispatchHandle>> Start(
      const StepSlice& slice, absl::Span<const RowSpan> hidden_states,
      const DispatchContext& context);

  absl::StatusOr<ExpertRows> Permute() override;
  absl::Status Combine(const float* expert_output) override;
  absl::Status Finish(const SourceAddend& addend, std::byte* output) override;

 protected:
  const StepSlice& slice() const { return slice_; }
  const DispatchContext& context() const { return context_; }
  const PartialSums& sums() const { return sums_; }
  const StepLists& lists() const { return lists_; }

 private:
  // The rows of each rank within the plan's numbering and within a buffer that holds those of all
  // other ranks, block after block: of as many rows as there are, or of `num_slots`.
  struct Blocks {
    Blocks(absl::Span<const int64_t> counts, int32_t ep_rank, int64_t num_slots);
    int64_t num_own() const { return own_last - own_first; }
    int64_t num_rows = 0;  // in the plan
    int64_t own_first = 0;
    int64_t own_last = 0;
    int64_t num_remote_places = 0;  // in the buffer
  };

  // Everything that follows the exchange of rows, into lists_.
  absl::Status Plan();
  // Where partials of the rows that were received go in Combine's buffer.
  absl::Status PlanDestinations(const Blocks& sent);
  bool PlansFirst() const;
  absl::Status SendRows();
  absl::Status SendRowsToOwners();
  absl::Status SendRowsToAll();
  // Gathers rows of the shard into a buffer for all other ranks.
  absl::Status GatherRowsToSend(const Blocks& sent, std::byte* buffer);
  absl::Status GatherRowsToSend(absl::Span<const int32_t> rows,
                                absl::Span<const int64_t> destinations, std::byte* buffer);
  absl::Status GatherRows(GatherRowsParams params);
  CollectiveTag Tag(uint32_t operation) const;
  absl::StatusOr<std::byte*> AllocateRows(int64_t num_rows, int64_t element_bytes);
  absl::StatusOr<std::byte*> AllocateRows(StepArena& arena, int64_t num_rows,
                                          int64_t element_bytes);
  // Bytes to or from each rank, none for the rank's own rows.
  absl::StatusOr<absl::Span<const int64_t>> RemoteBytes(absl::Span<const int64_t> counts,
                                                        int64_t num_slots, int64_t element_bytes);
  absl::Status AllToAll(uint32_t operation, const std::byte* send,
                        absl::Span<const int64_t> send_counts, std::byte* receive,
                        absl::Span<const int64_t> receive_counts, int64_t num_slots,
                        int64_t element_bytes);

  const StepSlice& slice_;
  const DispatchContext context_;
  const int64_t activation_bytes_;  // of one element
  const int64_t combine_bytes_;     // of one element
  std::vector<RowSpan> sources_;    // the shard, then the rows of other ranks
  StepLists lists_;
  Permutation permutation_;
  PartialSums sums_;
  absl::Span<const int64_t> sum_rows_;
  std::byte* returned_ = nullptr;  // the rank's own partials, then the others'
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_DISPATCH_ROW_EXCHANGE_H_
