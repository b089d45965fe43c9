#include "server/planning/slice_check.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/base/checked_math.h"

namespace expertmesh {
namespace {

absl::Status Bad(const char* field, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("slice.", field, ": ", what));
}

absl::Status CheckLength(const char* field, size_t length, int64_t expected) {
  if (static_cast<int64_t>(length) == expected) return absl::OkStatus();
  return Bad(field, absl::StrCat(length, " entries, must be ", expected));
}

// Counts per rank: [ep_size], none negative; their sum goes to `total`.
absl::Status CheckCounts(const char* field, absl::Span<const int64_t> counts, int32_t ep_size,
                         int64_t* total) {
  if (absl::Status status = CheckLength(field, counts.size(), ep_size); !status.ok()) {
    return status;
  }
  *total = 0;
  for (const int64_t count : counts) {
    const std::optional<int64_t> sum = CheckedAdd(*total, count);
    if (count < 0 || !sum || *sum > std::numeric_limits<int32_t>::max()) {
      return Bad(field, absl::StrCat("count ", count, " after ", *total, " others"));
    }
    *total = *sum;
  }
  return absl::OkStatus();
}

// Offsets of a CSR array: [num_rows + 1], from 0, ascending, up to num_entries.
absl::Status CheckOffsets(const char* field, absl::Span<const int64_t> offsets, int64_t num_rows,
                          int64_t num_entries) {
  if (absl::Status status = CheckLength(field, offsets.size(), num_rows + 1); !status.ok()) {
    return status;
  }
  if (offsets.front() != 0 || offsets.back() != num_entries) {
    return Bad(field, absl::StrCat("runs from ", offsets.front(), " to ", offsets.back(),
                                   ", must be 0 to ", num_entries));
  }
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) return Bad(field, absl::StrCat("descends at ", i));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status CheckIndices(const char* field, absl::Span<const T> indices, int64_t limit) {
  for (size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] < 0 || indices[i] >= limit) {
      return Bad(field,
                 absl::StrCat("entry ", i, " is ", indices[i], ", outside [0, ", limit, ")"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckHeader(const StepSlice& slice, int32_t ep_rank, int32_t ep_size) {
  if (slice.ep_size != ep_size) {
    return Bad("ep_size", absl::StrCat(slice.ep_size, ", this group has ", ep_size));
  }
  if (slice.ep_rank != ep_rank) {
    return Bad("ep_rank", absl::StrCat(slice.ep_rank, ", this rank is ", ep_rank));
  }
  const StepHeader& header = slice.header;
  if (header.combine != CombineMode::kSum && header.combine != CombineMode::kPerExpert) {
    return Bad("combine", absl::StrCat("unknown mode ", static_cast<int>(header.combine)));
  }
  if (!IsActivationDType(header.activation_dtype)) {
    return Bad("activation_dtype", std::string(DTypeName(header.activation_dtype)));
  }
  if (!IsActivationDType(header.combine_dtype)) {
    return Bad("combine_dtype", std::string(DTypeName(header.combine_dtype)));
  }
  if (!IsActivationDType(header.output_dtype)) {
    return Bad("output_dtype", std::string(DTypeName(header.output_dtype)));
  }
  if (slice.num_source_tokens < 0 ||
      slice.num_source_tokens > std::numeric_limits<int32_t>::max()) {
    return Bad("num_source_tokens", absl::StrCat(slice.num_source_tokens));
  }
  return absl::OkStatus();
}

// How many rows go back to each source must follow from the pairs.
absl::Status CheckReturnCounts(const StepSlice& slice, int32_t num_local_experts) {
  if (slice.header.combine == CombineMode::kSum) {
    if (slice.return_send_counts != slice.recv_counts) {
      return Bad("return_send_counts", "differ from recv_counts, with combine sum");
    }
    if (slice.return_recv_counts != slice.send_counts) {
      return Bad("return_recv_counts", "differ from send_counts, with combine sum");
    }
    return absl::OkStatus();
  }
  const bool distinct = !slice.header.apply_router_weight_on_input;
  std::vector<int64_t> last_row(num_local_experts, -1);
  int64_t row = 0;
  for (int32_t peer = 0; peer < slice.ep_size; ++peer) {
    int64_t num_rows = 0;
    for (const int64_t end = row + slice.recv_counts[peer]; row < end; ++row) {
      for (int64_t pair = slice.pair_offsets[row]; pair < slice.pair_offsets[row + 1]; ++pair) {
        int64_t& last = last_row[slice.pair_local_expert[pair]];
        num_rows += !distinct || last != row;
        last = row;
      }
    }
    if (slice.return_send_counts[peer] != num_rows) {
      return Bad("return_send_counts",
                 absl::StrCat(slice.return_send_counts[peer], " rows for rank ", peer,
                              ", its pairs give ", num_rows));
    }
  }
  return absl::OkStatus();
}

// The gathered rows of a source lie together, and a row that came from it is one of them.
absl::Status CheckGather(const StepSlice& slice) {
  if (slice.header.strategy != DispatchMode::kAllGatherReduceScatter) {
    absl::Status status = CheckLength("gather_counts", slice.gather_counts.size(), 0);
    status.Update(CheckLength("gather_rows", slice.gather_rows.size(), 0));
    return status;
  }
  int64_t num_gathered = 0;
  absl::Status status =
      CheckCounts("gather_counts", slice.gather_counts, slice.ep_size, &num_gathered);
  status.Update(CheckLength("gather_rows", slice.gather_rows.size(), slice.num_received_rows()));
  if (!status.ok()) return status;
  if (num_gathered > std::numeric_limits<int32_t>::max() - slice.num_source_tokens) {
    return Bad("gather_counts", "more rows than an int32 index can name");
  }
  int64_t num_own = 0;
  for (int64_t token = 0; token < slice.num_source_tokens; ++token) {
    num_own += slice.sum_offsets[token + 1] > slice.sum_offsets[token];
  }
  if (slice.gather_counts[slice.ep_rank] != num_own) {
    return Bad("gather_counts", absl::StrCat(slice.gather_counts[slice.ep_rank],
                                             " rows of this rank, ", num_own, " have an expert"));
  }
  int64_t first = 0;
  int64_t row = 0;
  for (int32_t source = 0; source < slice.ep_size; ++source) {
    const int64_t last = first + slice.gather_counts[source];
    for (const int64_t end = row + slice.recv_counts[source]; row < end; ++row) {
      if (slice.gather_rows[row] < first || slice.gather_rows[row] >= last) {
        return Bad("gather_rows", absl::StrCat("entry ", row, " is ", slice.gather_rows[row],
                                               ", outside [", first, ", ", last, ")"));
      }
    }
    first = last;
  }
  return absl::OkStatus();
}

// The rank gets tokens and logits, and plans the rest itself.
absl::Status CheckMonolithic(const StepSlice& slice) {
  const std::pair<const char*, size_t> absent[] = {
      {"send_counts", slice.send_counts.size()},
      {"send_rows", slice.send_rows.size()},
      {"recv_counts", slice.recv_counts.size()},
      {"pair_offsets", slice.pair_offsets.size()},
      {"pair_local_expert", slice.pair_local_expert.size()},
      {"pair_k", slice.pair_k.size()},
      {"pair_weights", slice.pair_weights.size()},
      {"return_send_counts", slice.return_send_counts.size()},
      {"return_recv_counts", slice.return_recv_counts.size()},
      {"sum_offsets", slice.sum_offsets.size()},
      {"sum_rows", slice.sum_rows.size()},
      {"sum_weights", slice.sum_weights.size()},
      {"gather_rows", slice.gather_rows.size()},
  };
  absl::Status status;
  for (const auto& [field, length] : absent) status.Update(CheckLength(field, length, 0));
  int64_t num_gathered = 0;
  status.Update(CheckCounts("gather_counts", slice.gather_counts, slice.ep_size, &num_gathered));
  if (!status.ok()) return status;
  if (num_gathered > std::numeric_limits<int32_t>::max() - slice.num_source_tokens) {
    return Bad("gather_counts", "more rows than an int32 index can name");
  }
  if (slice.gather_counts[slice.ep_rank] != slice.num_source_tokens) {
    return Bad("gather_counts",
               absl::StrCat(slice.gather_counts[slice.ep_rank], " rows of this rank, which has ",
                            slice.num_source_tokens, " tokens"));
  }
  return absl::OkStatus();
}

// The rows fit their slots, and no size that follows from them overflows.
absl::Status CheckSlots(const StepSlice& slice) {
  if (slice.header.strategy != DispatchMode::kAllToAllFixedCapacity) {
    if (slice.max_num_tokens != 0) return Bad("max_num_tokens", "with another strategy");
    if (slice.max_topk != 0) return Bad("max_topk", "with another strategy");
    return absl::OkStatus();
  }
  const std::optional<int64_t> most_rows = CheckedSizeProduct(
      {slice.ep_size, slice.max_num_tokens, std::max<int64_t>(slice.max_topk, 1)});
  if (slice.max_num_tokens < 1 || !most_rows ||
      *most_rows > std::numeric_limits<int32_t>::max() - slice.num_source_tokens) {
    return Bad("max_num_tokens", absl::StrCat(slice.max_num_tokens, " with max_topk ",
                                              slice.max_topk, " on ", slice.ep_size, " ranks"));
  }
  if (slice.max_topk < 0) return Bad("max_topk", absl::StrCat(slice.max_topk));
  for (int64_t row = 0; row < slice.num_received_rows(); ++row) {
    if (slice.pair_offsets[row + 1] - slice.pair_offsets[row] > slice.max_topk) {
      return Bad("pair_offsets",
                 absl::StrCat("row ", row, " has more pairs than max_topk ", slice.max_topk));
    }
  }
  const auto check_counts = [](const char* field, absl::Span<const int64_t> counts,
                               int64_t num_slots) {
    for (const int64_t count : counts) {
      if (count > num_slots) {
        return Bad(field, absl::StrCat(count, " rows, there are ", num_slots, " slots"));
      }
    }
    return absl::OkStatus();
  };
  absl::Status status = check_counts("send_counts", slice.send_counts, slice.max_num_tokens);
  status.Update(check_counts("recv_counts", slice.recv_counts, slice.max_num_tokens));
  status.Update(
      check_counts("return_send_counts", slice.return_send_counts, slice.max_return_rows()));
  status.Update(
      check_counts("return_recv_counts", slice.return_recv_counts, slice.max_return_rows()));
  return status;
}

// All rows are the rank's own, and the control plane sums.
absl::Status CheckDirect(const StepSlice& slice) {
  for (int32_t peer = 0; peer < slice.ep_size; ++peer) {
    if (peer == slice.ep_rank) continue;
    if (slice.send_counts[peer] != 0 || slice.recv_counts[peer] != 0) {
      return Bad("recv_counts", absl::StrCat("rows to or from rank ", peer, ", with direct"));
    }
    if (slice.return_send_counts[peer] != 0 || slice.return_recv_counts[peer] != 0) {
      return Bad("return_recv_counts", absl::StrCat("to or from rank ", peer, ", with direct"));
    }
  }
  if (slice.header.output_dtype != slice.header.combine_dtype) {
    return Bad("output_dtype", "is not combine_dtype, with direct");
  }
  if (slice.header.include_shared_experts) {
    return Bad("include_shared_experts", "the source is no rank, with direct");
  }
  absl::Status status = CheckLength("sum_offsets", slice.sum_offsets.size(), 0);
  status.Update(CheckLength("sum_rows", slice.sum_rows.size(), 0));
  status.Update(CheckLength("sum_weights", slice.sum_weights.size(), 0));
  return status;
}

absl::Status CheckSums(const StepSlice& slice, int64_t num_return_received) {
  if (slice.header.strategy == DispatchMode::kDirect) return CheckDirect(slice);
  const int64_t num_sums = static_cast<int64_t>(slice.sum_rows.size());
  absl::Status status =
      CheckOffsets("sum_offsets", slice.sum_offsets, slice.num_source_tokens, num_sums);
  status.Update(CheckIndices<int64_t>("sum_rows", slice.sum_rows, num_return_received));
  status.Update(CheckLength("sum_weights", slice.sum_weights.size(),
                            slice.header.combine == CombineMode::kPerExpert ? num_sums : 0));
  return status;
}

}  // namespace

absl::Status CheckSlice(const StepSlice& slice, int32_t ep_rank, int32_t ep_size,
                        int32_t num_local_experts) {
  absl::Status status = CheckHeader(slice, ep_rank, ep_size);
  if (slice.header.strategy == DispatchMode::kAllGatherReduceScatterMonolithic) {
    if (status.ok()) status = CheckMonolithic(slice);
    if (status.ok()) status = CheckSlots(slice);
    return status;
  }
  status.Update(CheckLength("router_logits", slice.router_logits.size(), 0));
  int64_t num_sent = 0;
  int64_t num_received = 0;
  int64_t num_return_sent = 0;
  int64_t num_return_received = 0;
  status.Update(CheckCounts("send_counts", slice.send_counts, ep_size, &num_sent));
  status.Update(CheckCounts("recv_counts", slice.recv_counts, ep_size, &num_received));
  status.Update(
      CheckCounts("return_send_counts", slice.return_send_counts, ep_size, &num_return_sent));
  status.Update(
      CheckCounts("return_recv_counts", slice.return_recv_counts, ep_size, &num_return_received));
  if (!status.ok()) return status;
  if (num_received > std::numeric_limits<int32_t>::max() - slice.num_source_tokens) {
    return Bad("recv_counts", "more rows than an int32 index can name");
  }
  if (slice.send_counts[ep_rank] != slice.recv_counts[ep_rank] ||
      slice.return_send_counts[ep_rank] != slice.return_recv_counts[ep_rank]) {
    return Bad("send_counts", "what the rank sends itself is not what it receives from itself");
  }

  status.Update(CheckLength("send_rows", slice.send_rows.size(), num_sent));
  status.Update(CheckIndices<int32_t>("send_rows", slice.send_rows, slice.num_source_tokens));

  const int64_t num_pairs = static_cast<int64_t>(slice.pair_local_expert.size());
  status.Update(CheckOffsets("pair_offsets", slice.pair_offsets, num_received, num_pairs));
  status.Update(CheckLength("pair_k", slice.pair_k.size(), num_pairs));
  status.Update(CheckLength("pair_weights", slice.pair_weights.size(), num_pairs));
  status.Update(
      CheckIndices<int32_t>("pair_local_expert", slice.pair_local_expert, num_local_experts));

  status.Update(CheckSums(slice, num_return_received));
  if (!status.ok()) return status;
  status = CheckGather(slice);
  if (status.ok()) status = CheckSlots(slice);
  if (!status.ok()) return status;
  return CheckReturnCounts(slice, num_local_experts);
}

}  // namespace expertmesh
