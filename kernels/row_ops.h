#ifndef EXPERTMESH_KERNELS_ROW_OPS_H_
#define EXPERTMESH_KERNELS_ROW_OPS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/base/dtype.h"
#include "kernels/base/step_arena.h"
#include "kernels/base/step_lists.h"
#include "kernels/base/stream.h"

namespace expertmesh {

// `num_rows` consecutive rows somewhere in memory. A shard of tokens is a list of spans over
// request buffers; a row's index counts through the list. Rows may be unaligned.
struct RowSpan {
  const std::byte* data = nullptr;
  int64_t num_rows = 0;
};

struct UploadRowsParams {
  absl::Span<const RowSpan> sources;  // host list, bytes on the host
  int64_t row_bytes = 0;
  std::byte* output = nullptr;  // stream's device: all rows of all spans, one behind the other
  // Memory that the device reaches, for spans that are packed before they cross. Must outlive the
  // copy.
  StepArena* host_arena = nullptr;
};

struct GatherRowsParams {
  // Host list; bytes on the stream's device. On the host they cost a device a copy with each call
  // (UploadRows once for all).
  absl::Span<const RowSpan> sources;
  int64_t hidden_size = 0;
  DType dtype = DType::kInvalid;
  absl::Span<const int32_t> row_indices;  // host, [n]: output row i is source row row_indices[i]
  // host, [n] or empty. With weights the output row is round(x * round_dtype(w)) in `dtype`
  // (apply_router_weight_on_input).
  absl::Span<const float> weights;
  // [n] or empty: output row i goes to row destination_indices[i] instead of row i (batched
  // format).
  absl::Span<const int64_t> destination_indices;
  std::byte* output =
      nullptr;  // [n, hidden_size] (or wide enough for the destinations), stream's device
  // Has sent all three lists, or null: then a device gets them with this call.
  const StepLists* lists = nullptr;
};

struct SumRowsParams {
  const std::byte* rows = nullptr;  // stream's device, [*, hidden_size]
  DType rows_dtype = DType::kInvalid;
  int64_t hidden_size = 0;
  // Host, CSR: output row t sums the entries [offsets[t], offsets[t + 1]) in that order, in float32
  // starting from 0, and the addend last:
  //   output[t] = round_output_dtype( sum_j weights[j] * rows[row_indices[j]]
  //                                   + addend_scales[t] * addend[t] )
  absl::Span<const int64_t> offsets;      // [n + 1]
  absl::Span<const int64_t> row_indices;  // [offsets[n]]
  absl::Span<const float> weights;  // [offsets[n]], or empty: plain sum, nothing is multiplied
  // [n] or empty: output row t goes to row destination_indices[t] instead of row t.
  absl::Span<const int64_t> destination_indices;
  // Stream's device. [n, hidden_size], or null: no addend.
  const float* addend = nullptr;
  // Stream's device. [n], or null: plain sum, nothing is multiplied.
  const float* addend_scales = nullptr;
  std::byte* output = nullptr;  // [n, hidden_size] (or wide enough for the destinations)
  DType output_dtype = DType::kInvalid;
  const StepLists* lists = nullptr;  // has sent all four lists, or null, as GatherRowsParams
};

struct SigmoidDotParams {
  const std::byte* rows = nullptr;  // [num_rows, hidden_size]
  DType rows_dtype = DType::kInvalid;
  int64_t num_rows = 0;
  int64_t hidden_size = 0;
  const float* vector = nullptr;  // [hidden_size]
  float* output = nullptr;        // [num_rows]
};

// The only code outside the FFN that touches the bytes of rows. Every operation is local and
// enqueued on `stream`; spans, lists and buffers must live until the stream has passed it. One call
// at a time per rank. INVALID_ARGUMENT for dtypes that are not activation dtypes. A row's bytes
// never depend on its neighbours.
class RowOps {
 public:
  virtual ~RowOps() = default;
  // The rows of a step cross to its device once, in as few copies as can be.
  virtual absl::Status UploadRows(const UploadRowsParams& params, Stream& stream) = 0;
  virtual absl::Status GatherRows(const GatherRowsParams& params, Stream& stream) = 0;
  virtual absl::Status SumRows(const SumRowsParams& params, Stream& stream) = 0;
  // output[i] = 1 / (1 + exp(-vector · rows[i])), all in float32 and on the stream's device.
  virtual absl::Status SigmoidDot(const SigmoidDotParams& params, Stream& stream) = 0;
};

// What every implementation refuses: INVALID_ARGUMENT with the field.
absl::Status CheckUploadRows(const UploadRowsParams& params);
absl::Status CheckGatherRows(const GatherRowsParams& params);
absl::Status CheckSumRows(const SumRowsParams& params);
absl::Status CheckSigmoidDot(const SigmoidDotParams& params);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_ROW_OPS_H_
