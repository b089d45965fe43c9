#include "server/rank/shared_experts.h"

#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"

namespace expertmesh {
namespace {

absl::StatusOr<Buffer> CopyToDevice(const std::vector<float>& values, RankBackend& backend) {
  const int64_t size_bytes = static_cast<int64_t>(values.size() * sizeof(float));
  absl::StatusOr<Buffer> buffer = backend.device_allocator()->Allocate(size_bytes);
  if (!buffer.ok() || values.empty()) return buffer;
  const std::unique_ptr<Stream> stream = backend.NewStream();
  absl::Status status = stream->Copy(buffer->data(), values.data(), size_bytes);
  if (status.ok()) status = stream->Wait(absl::InfiniteFuture());
  if (!status.ok()) return status;
  return buffer;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedExperts>> SharedExperts::Load(const WeightSource& source,
                                                                   const LayerSpec& layer,
                                                                   RankBackend& backend) {
  absl::StatusOr<LoadedSharedExperts> loaded = source.LoadSharedExperts(layer.index);
  if (!loaded.ok()) return loaded.status();
  const ModelSpec& model = source.model();
  if (loaded->gate.size() != (layer.shared_gated ? static_cast<size_t>(model.hidden_size) : 0)) {
    return absl::InternalError(absl::StrCat("layer ", layer.index, ": ", loaded->gate.size(),
                                            " values in the gate of the shared experts"));
  }
  absl::StatusOr<std::unique_ptr<ExpertKernels>> kernels =
      backend.NewExpertKernels(MakeExpertLayerShape(model, 1, layer.shared_intermediate_size));
  if (!kernels.ok()) return kernels.status();
  absl::Status status = (*kernels)->LoadExpert(0, loaded->weights);
  if (!status.ok()) return status;
  absl::StatusOr<Buffer> gate = CopyToDevice(loaded->gate, backend);
  if (!gate.ok()) return gate.status();
  return std::unique_ptr<SharedExperts>(new SharedExperts(*std::move(kernels), *std::move(gate)));
}

int64_t SharedExperts::weight_bytes() const {
  return kernels_->weight_bytes() + gate_.size_bytes();
}

absl::StatusOr<const std::byte*> SharedExperts::Input(const Rows& rows, int64_t size_bytes,
                                                      RowOps& row_ops, Stream& stream) const {
  // A device has them in one piece; those of the host lie in requests, wherever and unaligned.
  if (stream.device() != Device{} && rows.hidden_states.size() == 1) {
    return rows.hidden_states[0].data;
  }
  absl::StatusOr<std::byte*> input = rows.arena->Allocate(size_bytes);
  if (!input.ok()) return input.status();
  absl::StatusOr<absl::Span<int32_t>> indices =
      rows.host_arena->AllocateSpan<int32_t>(rows.num_rows);
  if (!indices.ok()) return indices.status();
  std::iota(indices->begin(), indices->end(), 0);
  GatherRowsParams gather;
  gather.sources = rows.hidden_states;
  gather.hidden_size = kernels_->shape().hidden_size;
  gather.dtype = rows.activation_dtype;
  gather.row_indices = *indices;
  gather.output = *input;
  if (absl::Status status = row_ops.GatherRows(gather, stream); !status.ok()) return status;
  return *input;
}

absl::StatusOr<SourceAddend> SharedExperts::Compute(const Rows& rows, RowOps& row_ops,
                                                    Stream& stream) const {
  const int64_t hidden_size = kernels_->shape().hidden_size;
  const std::optional<int64_t> num_elements = CheckedSizeProduct({rows.num_rows, hidden_size});
  const std::optional<int64_t> input_bytes =
      CheckedSizeProduct({rows.num_rows, hidden_size, DTypeBytes(rows.activation_dtype)});
  if (!num_elements || !input_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(rows.num_rows, " rows of ", hidden_size, " elements do not fit any memory"));
  }
  absl::StatusOr<const std::byte*> input = Input(rows, *input_bytes, row_ops, stream);
  if (!input.ok()) return input.status();
  absl::StatusOr<absl::Span<float>> output = rows.arena->AllocateSpan<float>(*num_elements);
  if (!output.ok()) return output.status();
  absl::StatusOr<absl::Span<int64_t>> offsets = rows.host_arena->AllocateSpan<int64_t>(2);
  if (!offsets.ok()) return offsets.status();
  (*offsets)[0] = 0;
  (*offsets)[1] = rows.num_rows;

  GroupedFfnParams ffn;
  ffn.format = ActivationFormat::kContiguous;
  ffn.activation_dtype = rows.activation_dtype;
  ffn.rows = *input;
  ffn.expert_offsets = *offsets;
  ffn.output = output->data();
  ffn.arena = rows.arena;
  absl::Status status = kernels_->GroupedFfn(ffn, stream);
  if (!status.ok()) return status;

  SourceAddend addend;
  addend.rows = output->data();
  if (gate_.empty()) return addend;
  absl::StatusOr<absl::Span<float>> scales = rows.arena->AllocateSpan<float>(rows.num_rows);
  if (!scales.ok()) return scales.status();
  SigmoidDotParams dot;
  dot.rows = *input;
  dot.rows_dtype = rows.activation_dtype;
  dot.num_rows = rows.num_rows;
  dot.hidden_size = hidden_size;
  dot.vector = reinterpret_cast<const float*>(gate_.data());
  dot.output = scales->data();
  status = row_ops.SigmoidDot(dot, stream);
  if (!status.ok()) return status;
  addend.scales = scales->data();
  return addend;
}

}  // namespace expertmesh
