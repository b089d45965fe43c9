#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/cpu_kernels.h"

namespace expertmesh {
namespace {

// For the estimate of a task's time: what one core copies or sums in a microsecond, from cold
// memory.
constexpr double kBytesPerMicro = 8e3;
// What a task should touch at least, so that taking it from the queue costs nothing beside it.
constexpr int64_t kMinTaskBytes = 128 << 10;

class CpuRowOps : public RowOps {
 public:
  CpuRowOps(const IsaTable* table, ParallelFor* parallel_for)
      : table_(*table), parallel_for_(*parallel_for) {}

  absl::Status UploadRows(const UploadRowsParams& params, Stream& stream) override {
    absl::Status status = CheckUploadRows(params);
    std::byte* output = params.output;
    for (const RowSpan& source : params.sources) {
      if (!status.ok()) break;
      const int64_t size_bytes = source.num_rows * params.row_bytes;
      status = stream.Copy(output, source.data, size_bytes);
      output += size_bytes;
    }
    return status;
  }

  absl::Status GatherRows(const GatherRowsParams& params, Stream& stream) override {
    if (const absl::Status status = CheckGatherRows(params); !status.ok()) return status;
    if (params.row_indices.empty()) return absl::OkStatus();
    return stream.Enqueue([this, params]() -> absl::Status {
      RunGather(params);
      return absl::OkStatus();
    });
  }

  absl::Status SumRows(const SumRowsParams& params, Stream& stream) override {
    if (const absl::Status status = CheckSumRows(params); !status.ok()) return status;
    if (params.offsets.size() == 1) return absl::OkStatus();
    return stream.Enqueue([this, params]() -> absl::Status {
      RunSum(params);
      return absl::OkStatus();
    });
  }

  absl::Status SigmoidDot(const SigmoidDotParams& params, Stream& stream) override {
    if (const absl::Status status = CheckSigmoidDot(params); !status.ok()) return status;
    if (params.num_rows == 0) return absl::OkStatus();
    return stream.Enqueue([this, params]() -> absl::Status {
      RunSigmoidDot(params);
      return absl::OkStatus();
    });
  }

 private:
  void RunGather(const GatherRowsParams& params) const;
  void RunSum(const SumRowsParams& params) const;
  void RunSigmoidDot(const SigmoidDotParams& params) const;
  // run(first, last) over [0, num_rows), in pieces.
  void RunPieces(int64_t num_rows, int64_t bytes_per_row,
                 absl::FunctionRef<void(int64_t first, int64_t last)> run) const;

  const IsaTable& table_;
  ParallelFor& parallel_for_;
};

void CpuRowOps::RunPieces(int64_t num_rows, int64_t bytes_per_row,
                          absl::FunctionRef<void(int64_t first, int64_t last)> run) const {
  const double micros =
      static_cast<double>(num_rows) * static_cast<double>(bytes_per_row) / kBytesPerMicro;
  const int64_t rows_per_task =
      std::max<int64_t>(1, kMinTaskBytes / std::max<int64_t>(1, bytes_per_row));
  const int64_t num_tasks = (num_rows + rows_per_task - 1) / rows_per_task;
  parallel_for_.RunNow(num_tasks, micros, [&](int64_t task, int) {
    const int64_t first = task * rows_per_task;
    run(first, std::min(first + rows_per_task, num_rows));
  });
}

void CpuRowOps::RunGather(const GatherRowsParams& params) const {
  const int64_t row_bytes = params.hidden_size * DTypeBytes(params.dtype);
  // Source row index at which each span ends.
  std::vector<int64_t> span_ends;
  span_ends.reserve(params.sources.size());
  for (const RowSpan& source : params.sources) {
    span_ends.push_back((span_ends.empty() ? 0 : span_ends.back()) + source.num_rows);
  }
  const auto source_row = [&](int64_t index) {
    const size_t span = static_cast<size_t>(
        std::upper_bound(span_ends.begin(), span_ends.end(), index) - span_ends.begin());
    const int64_t span_first = span_ends[span] - params.sources[span].num_rows;
    return params.sources[span].data + (index - span_first) * row_bytes;
  };
  const ElementType type = ElementTypeOf(params.dtype);
  RunPieces(static_cast<int64_t>(params.row_indices.size()), 2 * row_bytes,
            [&](int64_t first, int64_t last) {
              for (int64_t i = first; i < last; ++i) {
                const size_t index = static_cast<size_t>(i);
                const std::byte* source = source_row(params.row_indices[index]);
                const int64_t destination_row =
                    params.destination_indices.empty() ? i : params.destination_indices[index];
                std::byte* destination = params.output + destination_row * row_bytes;
                if (params.weights.empty()) {
                  std::memcpy(destination, source, static_cast<size_t>(row_bytes));
                  continue;
                }
                float factor = 0;
                StoreFloat(&factor, params.dtype, 0, params.weights[index]);
                factor = LoadFloat(&factor, params.dtype, 0);
                table_.scale(source, type, factor, destination, params.hidden_size);
              }
            });
}

void CpuRowOps::RunSum(const SumRowsParams& params) const {
  const int64_t num_rows = static_cast<int64_t>(params.offsets.size()) - 1;
  const int64_t in_bytes = params.hidden_size * DTypeBytes(params.rows_dtype);
  const int64_t out_bytes = params.hidden_size * DTypeBytes(params.output_dtype);
  const int64_t num_entries = params.offsets.back() - params.offsets.front();
  const int64_t addend_bytes =
      params.addend == nullptr ? 0 : params.hidden_size * int64_t{sizeof(float)};
  const int64_t bytes_per_row =
      out_bytes + addend_bytes + in_bytes * ((num_entries + num_rows - 1) / num_rows);
  RunPieces(num_rows, bytes_per_row, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t begin = params.offsets[static_cast<size_t>(row)];
      SumRowArgs args;
      args.rows = params.rows;
      args.row_stride_bytes = in_bytes;
      args.rows_type = ElementTypeOf(params.rows_dtype);
      args.row_indices = params.row_indices.data() + begin;
      args.weights = params.weights.empty() ? nullptr : params.weights.data() + begin;
      args.num_entries = params.offsets[static_cast<size_t>(row) + 1] - begin;
      args.addend = params.addend == nullptr ? nullptr : params.addend + row * params.hidden_size;
      args.addend_scale = params.addend_scales == nullptr ? 1.0f : params.addend_scales[row];
      args.num_columns = params.hidden_size;
      const int64_t destination_row = params.destination_indices.empty()
                                          ? row
                                          : params.destination_indices[static_cast<size_t>(row)];
      args.output = params.output + destination_row * out_bytes;
      args.output_type = ElementTypeOf(params.output_dtype);
      table_.sum_row(args);
    }
  });
}

void CpuRowOps::RunSigmoidDot(const SigmoidDotParams& params) const {
  const int64_t row_bytes = params.hidden_size * DTypeBytes(params.rows_dtype);
  RunPieces(params.num_rows, row_bytes, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      SigmoidDotArgs args;
      args.row = params.rows + row * row_bytes;
      args.row_type = ElementTypeOf(params.rows_dtype);
      args.vector = params.vector;
      args.num_columns = params.hidden_size;
      args.output = params.output + row;
      table_.sigmoid_dot(args);
    }
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<RowOps>> NewCpuRowOps(CpuIsa isa, ParallelFor* parallel_for) {
  absl::StatusOr<const IsaTable*> table = IsaTableFor(isa);
  if (!table.ok()) return table.status();
  return std::make_unique<CpuRowOps>(*table, parallel_for);
}

}  // namespace expertmesh
