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

// A span of pinned memory that is at least this large is fetched by the GPU; below, one copy of
// everything beats a copy for each.
constexpr int64_t kFetchedSpanBytes = 128 << 10;

// Rows of one memory that are read by one launch.
struct GatherSource {
  const std::byte* rows = nullptr;  // null: in the upload
  std::vector<int32_t> row_indices;
  std::vector<int32_t> entries;  // of GatherRowsParams, the same size
};

// What becomes of the rows of one span.
struct SpanUse {
  int64_t first_row = 0;    // in the numbering of all spans
  int32_t source = -1;      // index of its GatherSource
  bool is_fetched = false;  // as a whole, into memory of the device alone
  int64_t fetched_row = 0;  // its first row there
};

// How the rows of one GatherRows come together.
class GatherPlan {
 public:
  GatherPlan(const GatherRowsParams& params, const CudaAllocators& allocators);

  absl::StatusOr<std::shared_ptr<CudaUpload>> Upload();
  absl::Status Launch(cudaStream_t stream, const CudaUpload& upload, int32_t device_index) const;

 private:
  enum : int32_t { kPacked = 0, kFetched = 1, kFirstDeviceSpan = 2 };
  struct Fetch {
    const std::byte* from;
    int64_t first_row;
    int64_t num_rows;
  };
  struct Lists {
    int64_t row_indices = 0;
    int64_t destinations = -1;
    int64_t weights = -1;
  };

  const std::byte* SpanRow(size_t span, int64_t row) const {
    return params_.sources[span].data + (row - uses_[span].first_row) * row_bytes_;
  }

  const GatherRowsParams params_;
  const CudaAllocators allocators_;
  const int64_t row_bytes_;
  std::vector<SpanUse> uses_;
  std::vector<GatherSource> sources_;
  std::vector<const std::byte*> packed_rows_;
  std::vector<Fetch> fetches_;
  int64_t num_fetched_rows_ = 0;
  std::vector<Lists> lists_;  // of each source
  int64_t packed_offset_ = 0;
  int64_t fetched_offset_ = 0;
};

GatherPlan::GatherPlan(const GatherRowsParams& params, const CudaAllocators& allocators)
    : params_(params),
      allocators_(allocators),
      row_bytes_(params.hidden_size * DTypeBytes(params.dtype)),
      sources_(kFirstDeviceSpan) {
  std::vector<int64_t> ends;
  int64_t num_rows = 0;
  for (const RowSpan& span : params.sources) {
    uses_.push_back({num_rows, -1, false, 0});
    num_rows += span.num_rows;
    ends.push_back(num_rows);
  }
  // A host row is packed once, however often it is gathered.
  std::vector<int32_t> packed_at(static_cast<size_t>(num_rows), -1);
  for (size_t i = 0; i < params.row_indices.size(); ++i) {
    const int64_t row = params.row_indices[i];
    const size_t span =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), row) - ends.begin());
    SpanUse& use = uses_[span];
    const RowSpan& rows = params.sources[span];
    if (use.source < 0) {
      if (allocators.device->Owns(rows.data)) {
        use.source = static_cast<int32_t>(sources_.size());
        sources_.push_back({rows.data, {}, {}});
      } else if (rows.num_rows * row_bytes_ >= kFetchedSpanBytes &&
                 allocators.pinned->Owns(rows.data)) {
        use.source = kFetched;
        use.fetched_row = num_fetched_rows_;
        fetches_.push_back({rows.data, num_fetched_rows_, rows.num_rows});
        num_fetched_rows_ += rows.num_rows;
      } else {
        use.source = kPacked;
      }
    }
    GatherSource& source = sources_[static_cast<size_t>(use.source)];
    int32_t index = static_cast<int32_t>(row - use.first_row);
    if (use.source == kFetched) {
      index += static_cast<int32_t>(use.fetched_row);
    } else if (use.source == kPacked) {
      int32_t& packed = packed_at[static_cast<size_t>(row)];
      if (packed < 0) {
        packed = static_cast<int32_t>(packed_rows_.size());
        packed_rows_.push_back(SpanRow(span, row));
      }
      index = packed;
    }
    source.row_indices.push_back(index);
    source.entries.push_back(static_cast<int32_t>(i));
  }
}

absl::StatusOr<std::shared_ptr<CudaUpload>> GatherPlan::Upload() {
  auto upload = std::make_shared<CudaUpload>(allocators_);
  // Rows of several sources interleave in the output.
  const auto is_used = [](const GatherSource& source) { return !source.row_indices.empty(); };
  const bool has_destinations = !params_.destination_indices.empty() ||
                                std::count_if(sources_.begin(), sources_.end(), is_used) > 1;
  for (const GatherSource& source : sources_) {
    const int64_t count = static_cast<int64_t>(source.row_indices.size());
    Lists lists;
    lists.row_indices = upload->Reserve(count * int64_t{sizeof(int32_t)});
    if (has_destinations) lists.destinations = upload->Reserve(count * int64_t{sizeof(int64_t)});
    if (!params_.weights.empty()) lists.weights = upload->Reserve(count * int64_t{sizeof(float)});
    lists_.push_back(lists);
  }
  const auto packed_bytes =
      CheckedSizeProduct({static_cast<int64_t>(packed_rows_.size()), row_bytes_});
  const auto fetched_bytes = CheckedSizeProduct({num_fetched_rows_, row_bytes_});
  if (!packed_bytes || !fetched_bytes) {
    return absl::ResourceExhaustedError("rows of the host do not fit any memory");
  }
  packed_offset_ = upload->Reserve(*packed_bytes);
  fetched_offset_ = upload->ReserveOnDevice(*fetched_bytes);
  if (absl::Status status = upload->Allocate(); !status.ok()) return status;

  for (size_t s = 0; s < sources_.size(); ++s) {
    const GatherSource& source = sources_[s];
    upload->Fill<int32_t>(lists_[s].row_indices, source.row_indices);
    for (size_t i = 0; i < source.entries.size(); ++i) {
      const size_t entry = static_cast<size_t>(source.entries[i]);
      if (lists_[s].destinations >= 0) {
        upload->host<int64_t>(lists_[s].destinations)[i] = params_.destination_indices.empty()
                                                               ? static_cast<int64_t>(entry)
                                                               : params_.destination_indices[entry];
      }
      if (lists_[s].weights >= 0) {
        upload->host<float>(lists_[s].weights)[i] = params_.weights[entry];
      }
    }
  }
  std::byte* packed = packed_rows_.empty() ? nullptr : upload->host<std::byte>(packed_offset_);
  for (const std::byte* row : packed_rows_) {
    std::memcpy(packed, row, static_cast<size_t>(row_bytes_));
    packed += row_bytes_;
  }
  return upload;
}

absl::Status GatherPlan::Launch(cudaStream_t stream, const CudaUpload& upload,
                                int32_t device_index) const {
  if (absl::Status status = upload.Copy(stream); !status.ok()) return status;
  for (const Fetch& fetch : fetches_) {
    const int64_t size_bytes = fetch.num_rows * row_bytes_;
    absl::Status status =
        CudaStatus(cudaMemcpyAsync(
                       upload.device_only(fetched_offset_) + fetch.first_row * row_bytes_,
                       fetch.from, static_cast<size_t>(size_bytes), cudaMemcpyHostToDevice, stream),
                   absl::StrCat("cudaMemcpyAsync(", size_bytes, ")"), device_index);
    if (!status.ok()) return status;
  }
  for (size_t s = 0; s < sources_.size(); ++s) {
    const GatherSource& source = sources_[s];
    if (source.row_indices.empty()) continue;
    CudaPermuteRowsParams permute;
    permute.rows = source.rows;
    if (s == kPacked) permute.rows = upload.device<std::byte>(packed_offset_);
    if (s == kFetched) permute.rows = upload.device_only(fetched_offset_);
    permute.dtype = params_.dtype;
    permute.hidden_size = params_.hidden_size;
    permute.num_rows = static_cast<int64_t>(source.row_indices.size());
    permute.row_indices = upload.device<int32_t>(lists_[s].row_indices);
    if (lists_[s].destinations >= 0) {
      permute.destination_indices = upload.device<int64_t>(lists_[s].destinations);
    }
    if (lists_[s].weights >= 0) permute.weights = upload.device<float>(lists_[s].weights);
    permute.output = params_.output;
    absl::Status status =
        CudaStatus(LaunchPermuteRows(permute, stream), "LaunchPermuteRows", device_index);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

class CudaRowOps : public RowOps {
 public:
  explicit CudaRowOps(const CudaAllocators& allocators) : allocators_(allocators) {}

  absl::Status GatherRows(const GatherRowsParams& params, Stream& stream) override {
    if (absl::Status status = CheckGatherRows(params); !status.ok()) return status;
    absl::StatusOr<CudaStream*> cuda = Find(stream);
    if (!cuda.ok() || params.row_indices.empty()) return cuda.status();
    auto plan = std::make_unique<GatherPlan>(params, allocators_);
    absl::StatusOr<std::shared_ptr<CudaUpload>> upload = plan->Upload();
    if (!upload.ok()) return upload.status();
    return Launch(**cuda, *upload,
                  [plan = std::move(plan), device = stream.device().index](
                      cudaStream_t cuda_stream, const CudaUpload& uploaded) {
                    return plan->Launch(cuda_stream, uploaded, device);
                  });
  }

  absl::Status SumRows(const SumRowsParams& params, Stream& stream) override {
    if (absl::Status status = CheckSumRows(params); !status.ok()) return status;
    absl::StatusOr<CudaStream*> cuda = Find(stream);
    if (!cuda.ok() || params.offsets.size() == 1) return cuda.status();
    const int64_t first = params.offsets.front();
    const int64_t count = params.offsets.back() - first;
    auto upload = std::make_shared<CudaUpload>(allocators_);
    const int64_t offsets_at =
        upload->Reserve(static_cast<int64_t>(params.offsets.size() * sizeof(int64_t)));
    const int64_t indices_at = upload->Reserve(count * int64_t{sizeof(int64_t)});
    const int64_t weights_at =
        params.weights.empty() ? -1 : upload->Reserve(count * int64_t{sizeof(float)});
    if (absl::Status status = upload->Allocate(); !status.ok()) return status;
    std::transform(params.offsets.begin(), params.offsets.end(), upload->host<int64_t>(offsets_at),
                   [first](int64_t offset) { return offset - first; });
    const auto part = [&](auto span) {
      return span.subspan(static_cast<size_t>(first), static_cast<size_t>(count));
    };
    upload->Fill<int64_t>(indices_at, part(params.row_indices));
    if (weights_at >= 0) upload->Fill<float>(weights_at, part(params.weights));

    CudaSumRowsParams sum;
    sum.rows = params.rows;
    sum.rows_dtype = params.rows_dtype;
    sum.hidden_size = params.hidden_size;
    sum.num_outputs = static_cast<int64_t>(params.offsets.size()) - 1;
    sum.offsets = upload->device<int64_t>(offsets_at);
    sum.row_indices = upload->device<int64_t>(indices_at);
    if (weights_at >= 0) sum.weights = upload->device<float>(weights_at);
    sum.addend = params.addend;
    sum.addend_scales = params.addend_scales;
    sum.output = params.output;
    sum.output_dtype = params.output_dtype;
    return Launch(**cuda, upload,
                  [sum, device = stream.device().index](cudaStream_t cuda_stream,
                                                        const CudaUpload& uploaded) {
                    absl::Status status = uploaded.Copy(cuda_stream);
                    if (!status.ok()) return status;
                    return CudaStatus(LaunchSumRows(sum, cuda_stream), "LaunchSumRows", device);
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

  template <class Body>
  static absl::Status Launch(CudaStream& stream, std::shared_ptr<CudaUpload> upload, Body body) {
    absl::Status status =
        stream.Launch([upload, body = std::move(body)](cudaStream_t cuda_stream) mutable {
          return body(cuda_stream, *upload);
        });
    if (!status.ok()) return status;
    return CudaUpload::FreeAfter(stream, std::move(upload));
  }

  const CudaAllocators allocators_;
};

}  // namespace

std::unique_ptr<RowOps> NewCudaRowOps(const CudaAllocators& allocators) {
  return std::make_unique<CudaRowOps>(allocators);
}

}  // namespace expertmesh
