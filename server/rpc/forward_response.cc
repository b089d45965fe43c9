#include "server/rpc/forward_response.h"

#include <memory>
#include <utility>

#include "server/rpc/forward_encoder.h"
#include "server/rpc/wire_enums.h"

namespace expertmesh {
namespace {

void FillServedBy(const ForwardAnswerInfo& info, const ServingBackend& backend, uint64_t epoch,
                  v1::ServedBy* served_by) {
  const ExpertGroup& group = *backend.group;
  served_by->set_incarnation(group.incarnation());
  served_by->set_epoch(epoch);
  served_by->set_ep_size(group.ep_size());
  const std::string instruction_set = group.instruction_set();
  const DType weight_dtype = group.weight_dtype(info.model->name);
  // Asked for after those: the next epoch's ranks may be others.
  if (!group.is_remote() || group.epoch() == epoch) {
    served_by->set_instruction_set(instruction_set);
    served_by->set_weight_dtype(DTypeToWire(weight_dtype));
  }
  served_by->set_fingerprint(info.model->fingerprint);
  served_by->set_placement_fingerprint(backend.placement_fingerprints.at(info.model));
}

void FillTimings(const ForwardTimings& timings, absl::Duration total, v1::Timings* out) {
  out->set_queue_micros(timings.queue_micros);
  out->set_route_micros(timings.route_micros);
  out->set_plan_micros(timings.plan_micros);
  out->set_dispatch_micros(timings.step.dispatch_micros);
  out->set_compute_micros(timings.step.compute_micros);
  out->set_combine_micros(timings.step.combine_micros);
  out->set_total_micros(absl::ToInt64Microseconds(total));
}

void FillStats(const ForwardAnswerInfo& info, const ForwardStats& stats, v1::Stats* out) {
  out->set_num_tokens(info.num_tokens);
  out->set_num_pairs(stats.num_pairs);
  out->set_num_tokens_without_expert(stats.num_tokens_without_expert);
  out->set_step_num_tokens(stats.step_tokens);
  out->mutable_tokens_per_expert()->Add(stats.tokens_per_expert.begin(),
                                        stats.tokens_per_expert.end());
  out->mutable_rows_per_rank()->Add(stats.rows_per_rank.begin(), stats.rows_per_rank.end());
  out->set_dispatch_bytes(stats.dispatch_bytes);
  out->set_combine_bytes(stats.combine_bytes);
}

// The spans' elements as float32, in one buffer.
absl::StatusOr<OutputSpan> WidenOutput(const std::vector<OutputSpan>& spans, DType dtype,
                                       Allocator* allocator) {
  int64_t size_bytes = 0;
  for (const OutputSpan& span : spans) size_bytes += span.size_bytes;
  absl::StatusOr<Buffer> buffer = allocator->Allocate(size_bytes / DTypeBytes(dtype) * 4);
  if (!buffer.ok()) return buffer.status();
  int64_t index = 0;
  for (const OutputSpan& span : spans) {
    const int64_t count = span.size_bytes / DTypeBytes(dtype);
    for (int64_t i = 0; i < count; ++i) {
      StoreFloat(buffer->data(), DType::kFloat32, index++, LoadFloat(span.data, dtype, i));
    }
  }
  auto owner = std::make_shared<Buffer>(std::move(*buffer));
  return OutputSpan{owner->data(), owner->size_bytes(), owner};
}

absl::StatusOr<grpc::ByteBuffer> Encode(std::optional<uint64_t> stream_seq,
                                        const v1::ForwardResponse& header,
                                        const EncodedOutput* output) {
  return stream_seq.has_value() ? EncodeForwardStreamResponse(*stream_seq, header, output)
                                : EncodeForwardResponse(header, output);
}

}  // namespace

ForwardAnswerInfo AnswerInfoOf(const ValidForward& valid) {
  ForwardAnswerInfo info;
  info.request_id = valid.call->request_id;
  info.model = valid.call->model;
  info.num_tokens = valid.call->num_tokens;
  info.output_dtype = valid.call->output_dtype;
  info.output_as_values = valid.output_as_values;
  info.stats_only = valid.stats_only;
  return info;
}

absl::StatusOr<grpc::ByteBuffer> EncodeAnswer(const ForwardAnswerInfo& info,
                                              const ServingBackend& backend, ForwardResult result,
                                              absl::Duration total, Allocator* allocator,
                                              std::optional<uint64_t> stream_seq) {
  v1::ForwardResponse header;
  header.set_request_id(info.request_id);
  v1::ServedBy* served_by = header.mutable_served_by();
  const bool has_steps = result.stats.num_steps > 0;
  FillServedBy(info, backend, has_steps ? result.epoch : backend.group->epoch(), served_by);
  if (has_steps) {
    served_by->set_incarnation(result.incarnation);
    served_by->set_step(result.last_step);
    served_by->set_num_steps(result.stats.num_steps);
    served_by->set_strategy(DispatchModeToWire(result.strategy));
  }
  FillTimings(result.timings, total, header.mutable_timings());
  FillStats(info, result.stats, header.mutable_stats());
  if (info.stats_only) return Encode(stream_seq, header, nullptr);

  EncodedOutput output;
  output.tensor.set_dtype(DTypeToWire(info.output_dtype));
  output.tensor.add_shape(info.num_tokens);
  output.tensor.add_shape(info.model->hidden_size);
  OutputSpan widened;
  if (info.output_as_values) {
    absl::StatusOr<OutputSpan> span = WidenOutput(result.output, info.output_dtype, allocator);
    if (!span.ok()) return span.status();
    widened = std::move(*span);
    output.spans = absl::MakeConstSpan(&widened, 1);
    output.field = EncodedOutput::Field::kValues;
  } else {
    output.spans = result.output;
  }
  return Encode(stream_seq, header, &output);
}

absl::StatusOr<grpc::ByteBuffer> EncodeValidated(const ForwardAnswerInfo& info,
                                                 const ServingBackend& backend,
                                                 std::optional<uint64_t> stream_seq) {
  v1::ForwardResponse header;
  header.set_request_id(info.request_id);
  FillServedBy(info, backend, backend.group->epoch(), header.mutable_served_by());
  return Encode(stream_seq, header, nullptr);
}

}  // namespace expertmesh
