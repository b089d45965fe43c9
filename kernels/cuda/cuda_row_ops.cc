#include "kernels/cuda/cuda_row_ops.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/permute_rows.h"
#include "kernels/cuda/sigmoid_dot.h"
#include "kernels/cuda/sum_rows.h"

namespace expertmesh {
namespace {

// A span of pinned memory that is at least this large crosses from where it lies; below, packing it
// with its neighbours costs less than a copy of its own.
constexpr int64_t kUnpackedSpanBytes = 128 << 10;

// What a call needs on the device that its step did not bring there.
struct CallMemory {
  explicit CallMemory(const CudaAllocators& allocators)
      : kept(allocators), device(kept.device.get()), host(kept.pinned.get()) {}
  const CudaAllocators kept;
  StepArena device;
  StepArena host;
  StepLists lists{&device, &host};
};

// Null in `found` for an empty list.
template <class T>
absl::Status FindList(const StepLists& lists, const char* field, absl::Span<const T> list,
                      const T** found) {
  *found = lists.Find(list);
  if (*found != nullptr || list.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("lists: has not sent ", field));
}

class CudaRowOps : public RowOps {
 public:
  explicit CudaRowOps(const CudaAllocators& allocators) : allocators_(allocators) {}

  absl::Status UploadRows(const UploadRowsParams& params, Stream& stream) override {
    if (absl::Status status = CheckUploadRows(params); !status.ok()) return status;
    if (absl::StatusOr<CudaStream*> cuda = Find(stream); !cuda.ok()) return cuda.status();
    std::byte* output = params.output;
    for (size_t i = 0; i < params.sources.size();) {
      // A span by itself, or all up to the next such one.
      size_t end = i + 1;
      int64_t num_rows = params.sources[i].num_rows;
      const bool is_large = CrossesUnpacked(params.sources[i], params.row_bytes);
      while (!is_large && end < params.sources.size() &&
             !CrossesUnpacked(params.sources[end], params.row_bytes)) {
        num_rows += params.sources[end++].num_rows;
      }
      const auto size_bytes = CheckedSizeProduct({num_rows, params.row_bytes});
      if (!size_bytes) return absl::ResourceExhaustedError("rows do not fit any memory");
      const absl::Span<const RowSpan> spans = params.sources.subspan(i, end - i);
      absl::StatusOr<const std::byte*> rows = Reachable(spans, *size_bytes, params);
      if (!rows.ok()) return rows.status();
      absl::Status status = stream.Copy(output, *rows, *size_bytes);
      if (!status.ok()) return status;
      output += *size_bytes;
      i = end;
    }
    return absl::OkStatus();
  }

  absl::Status GatherRows(const GatherRowsParams& params, Stream& stream) override {
    if (absl::Status status = CheckGatherRows(params); !status.ok()) return status;
    absl::StatusOr<CudaStream*> cuda = Find(stream);
    if (!cuda.ok() || params.row_indices.empty()) return cuda.status();
    const auto is_on_host = [this](const RowSpan& span) {
      return span.num_rows > 0 && !allocators_.device->Owns(span.data);
    };
    if (params.lists != nullptr &&
        std::none_of(params.sources.begin(), params.sources.end(), is_on_host)) {
      return Gather(params, params.sources, **cuda);
    }
    return WithMemory(**cuda, [&](CallMemory& memory) {
      GatherRowsParams here = params;
      if (params.lists == nullptr) {
        memory.lists.Add(params.row_indices);
        memory.lists.Add(params.weights);
        memory.lists.Add(params.destination_indices);
        here.lists = &memory.lists;
      }
      absl::Status status = memory.lists.Send(stream);
      std::vector<RowSpan> sources;
      for (const RowSpan& span : params.sources) {
        sources.push_back(span);
        if (!is_on_host(span) || !status.ok()) continue;
        UploadRowsParams upload;
        upload.sources = absl::MakeConstSpan(&span, 1);
        upload.row_bytes = params.hidden_size * DTypeBytes(params.dtype);
        upload.host_arena = &memory.host;
        const auto size_bytes = CheckedSizeProduct({span.num_rows, upload.row_bytes});
        if (!size_bytes) return absl::ResourceExhaustedError("rows do not fit any memory");
        absl::StatusOr<std::byte*> output = memory.device.Allocate(*size_bytes);
        if (!output.ok()) return output.status();
        sources.back().data = upload.output = *output;
        status = UploadRows(upload, stream);
      }
      return status.ok() ? Gather(here, sources, **cuda) : status;
    });
  }

  absl::Status SumRows(const SumRowsParams& params, Stream& stream) override {
    if (absl::Status status = CheckSumRows(params); !status.ok()) return status;
    absl::StatusOr<CudaStream*> cuda = Find(stream);
    if (!cuda.ok() || params.offsets.size() == 1) return cuda.status();
    if (params.lists != nullptr) return Sum(params, **cuda);
    return WithMemory(**cuda, [&](CallMemory& memory) {
      SumRowsParams here = params;
      memory.lists.Add(params.offsets);
      memory.lists.Add(params.row_indices);
      memory.lists.Add(params.weights);
      memory.lists.Add(params.destination_indices);
      here.lists = &memory.lists;
      absl::Status status = memory.lists.Send(stream);
      return status.ok() ? Sum(here, **cuda) : status;
    });
  }

  absl::Status SigmoidDot(const SigmoidDotParams& params, Stream& stream) override {
    if (absl::Status status = CheckSigmoidDot(params); !status.ok()) return status;
    absl::StatusOr<CudaStream*> cuda = Find(stream);
    if (!cuda.ok() || params.num_rows == 0) return cuda.status();
    CudaSigmoidDotParams dot;
    dot.rows = params.rows;
    dot.rows_dtype = params.rows_dtype;
    dot.num_rows = params.num_rows;
    dot.hidden_size = params.hidden_size;
    dot.vector = params.vector;
    dot.output = params.output;
    return (*cuda)->Launch([dot, device = stream.device().index](cudaStream_t cuda_stream) {
      return CudaStatus(LaunchSigmoidDot(dot, cuda_stream), "LaunchSigmoidDot", device);
    });
  }

 private:
  absl::StatusOr<CudaStream*> Find(Stream& stream) const {
    CudaStream* cuda = AsCudaStream(stream);
    if (cuda == nullptr || !(stream.device() == allocators_.device->device())) {
      return absl::InvalidArgumentError(
          absl::StrCat("stream: not of cuda:", allocators_.device->device().index));
    }
    return cuda;
  }

  bool CrossesUnpacked(const RowSpan& span, int64_t row_bytes) const {
    return span.num_rows >= (kUnpackedSpanBytes + row_bytes - 1) / row_bytes &&
           allocators_.pinned->Owns(span.data);
  }

  // The rows of these spans in one piece of memory that the device reaches.
  absl::StatusOr<const std::byte*> Reachable(absl::Span<const RowSpan> spans, int64_t size_bytes,
                                             const UploadRowsParams& params) const {
    if (spans.size() == 1 && allocators_.pinned->Owns(spans[0].data)) return spans[0].data;
    absl::StatusOr<std::byte*> packed = params.host_arena->Allocate(size_bytes);
    if (!packed.ok()) return packed.status();
    std::byte* end = *packed;
    for (const RowSpan& span : spans) {
      if (span.num_rows == 0) continue;
      const int64_t span_bytes = span.num_rows * params.row_bytes;
      std::memcpy(end, span.data, static_cast<size_t>(span_bytes));
      end += span_bytes;
    }
    return *packed;
  }

  // Calls `enqueue` and keeps the memory until `stream` has passed what that enqueued.
  template <class Enqueue>
  absl::Status WithMemory(CudaStream& stream, Enqueue enqueue) const {
    auto memory = std::make_shared<CallMemory>(allocators_);
    absl::Status status = enqueue(*memory);
    const Event passed;
    status.Update(stream.Record(passed));
    passed.OnDone([memory = std::move(memory)] {});
    return status;
  }

  // With all sources and lists on the device.
  static absl::Status Gather(const GatherRowsParams& params, absl::Span<const RowSpan> sources,
                             CudaStream& stream) {
    CudaPermuteRowsParams permute;
    permute.dtype = params.dtype;
    permute.hidden_size = params.hidden_size;
    permute.num_rows = static_cast<int64_t>(params.row_indices.size());
    permute.output = params.output;
    const StepLists& lists = *params.lists;
    absl::Status status = FindList(lists, "row_indices", params.row_indices, &permute.row_indices);
    status.Update(FindList(lists, "weights", params.weights, &permute.weights));
    status.Update(FindList(lists, "destination_indices", params.destination_indices,
                           &permute.destination_indices));
    int64_t num_rows = 0;
    for (const RowSpan& span : sources) {
      if (span.num_rows == 0 || !status.ok()) continue;
      if (permute.rows == nullptr) {
        permute.rows = span.data;
        permute.first_row = num_rows;
      } else {
        permute.more[permute.num_more++] = {span.data, num_rows};
      }
      num_rows += span.num_rows;
      if (permute.num_more < CudaPermuteRowsParams::kMaxSources - 1) continue;
      permute.end_row = num_rows;
      status = Launch(permute, stream);
      permute.rows = nullptr;
      permute.num_more = 0;
    }
    if (!status.ok() || permute.rows == nullptr) return status;
    permute.end_row = num_rows;
    return Launch(permute, stream);
  }

  static absl::Status Launch(const CudaPermuteRowsParams& permute, CudaStream& stream) {
    return stream.Launch([permute, device = stream.device().index](cudaStream_t cuda_stream) {
      return CudaStatus(LaunchPermuteRows(permute, cuda_stream), "LaunchPermuteRows", device);
    });
  }

  // With all lists on the device.
  static absl::Status Sum(const SumRowsParams& params, CudaStream& stream) {
    CudaSumRowsParams sum;
    sum.rows = params.rows;
    sum.rows_dtype = params.rows_dtype;
    sum.hidden_size = params.hidden_size;
    sum.num_outputs = static_cast<int64_t>(params.offsets.size()) - 1;
    sum.addend = params.addend;
    sum.addend_scales = params.addend_scales;
    sum.output = params.output;
    sum.output_dtype = params.output_dtype;
    const StepLists& lists = *params.lists;
    absl::Status status = FindList(lists, "offsets", params.offsets, &sum.offsets);
    status.Update(FindList(lists, "row_indices", params.row_indices, &sum.row_indices));
    status.Update(FindList(lists, "weights", params.weights, &sum.weights));
    status.Update(FindList(lists, "destination_indices", params.destination_indices,
                           &sum.destination_indices));
    if (!status.ok()) return status;
    return stream.Launch([sum, device = stream.device().index](cudaStream_t cuda_stream) {
      return CudaStatus(LaunchSumRows(sum, cuda_stream), "LaunchSumRows", device);
    });
  }

  const CudaAllocators allocators_;
};

}  // namespace

std::unique_ptr<RowOps> NewCudaRowOps(const CudaAllocators& allocators) {
  return std::make_unique<CudaRowOps>(allocators);
}

}  // namespace expertmesh
