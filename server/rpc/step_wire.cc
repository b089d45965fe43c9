#include "server/rpc/step_wire.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"
#include "server/ops/call_error.h"
#include "server/rpc/forward_encoder.h"
#include "server/rpc/payload_message.h"
#include "server/rpc/status_mapping.h"
#include "server/rpc/wire_enums.h"

namespace expertmesh {
namespace {

constexpr PayloadPath kSlicePath = {v1::RunStepsResponse::kSliceFieldNumber,
                                    v1::StepSlice::kShardFieldNumber, v1::Tensor::kDataFieldNumber};
constexpr PayloadPath kResultPath = {v1::RunStepsRequest::kResultFieldNumber,
                                     v1::StepResult::kOutputFieldNumber,
                                     v1::Tensor::kDataFieldNumber};

using PackedInts = google::protobuf::RepeatedField<int32_t>;
using PackedFloats = google::protobuf::RepeatedField<float>;

absl::Status NoInt32(int64_t count) {
  return absl::InvalidArgumentError(absl::StrCat("slice: the count ", count, " is no int32"));
}

absl::Status NoMemory(const char* what, const absl::Status& error) {
  return CallError(ErrorReason::kBuffersExhausted,
                   absl::StrCat("no memory for ", what, ": ", error.message()));
}

// False when an entry does not fit the wire.
bool Pack(absl::Span<const int64_t> values, PackedInts* packed) {
  packed->Reserve(static_cast<int>(values.size()));
  for (const int64_t value : values) {
    if (value < 0 || value > std::numeric_limits<int32_t>::max()) return false;
    packed->AddAlreadyReserved(static_cast<int32_t>(value));
  }
  return true;
}

template <typename T>
void PackSame(const std::vector<T>& values, google::protobuf::RepeatedField<T>* packed) {
  packed->Add(values.begin(), values.end());
}

template <typename To, typename From>
std::vector<To> Unpack(const google::protobuf::RepeatedField<From>& packed) {
  return std::vector<To>(packed.begin(), packed.end());
}

absl::StatusOr<v1::StepSlice> ToWire(const StepSlice& slice, absl::Duration timeout) {
  const StepHeader& header = slice.header;
  v1::StepSlice wire;
  wire.set_incarnation(header.incarnation);
  wire.set_epoch(header.epoch);
  wire.set_step(header.step);
  wire.set_dispatch_order(header.dispatch_order);
  wire.set_combine_order(header.combine_order);
  wire.set_model(header.model);
  wire.set_layer(header.layer);
  wire.set_strategy(DispatchModeToWire(header.strategy));
  wire.set_combine(header.combine == CombineMode::kPerExpert ? v1::COMBINE_PER_EXPERT
                                                             : v1::COMBINE_PER_OWNER);
  wire.set_combine_dtype(DTypeToWire(header.combine_dtype));
  wire.set_output_dtype(DTypeToWire(header.output_dtype));
  wire.set_apply_router_weight_on_input(header.apply_router_weight_on_input);
  wire.set_include_shared_experts(header.include_shared_experts);
  wire.set_timeout_micros(absl::ToInt64Microseconds(timeout));
  const bool fits = Pack(slice.send_counts, wire.mutable_send_counts()) &&
                    Pack(slice.recv_counts, wire.mutable_recv_counts()) &&
                    Pack(slice.pair_offsets, wire.mutable_pair_offsets()) &&
                    Pack(slice.return_send_counts, wire.mutable_return_send_counts()) &&
                    Pack(slice.return_recv_counts, wire.mutable_return_recv_counts()) &&
                    Pack(slice.sum_offsets, wire.mutable_sum_offsets()) &&
                    Pack(slice.sum_rows, wire.mutable_sum_rows()) &&
                    Pack(slice.gather_counts, wire.mutable_gather_counts());
  if (!fits || slice.max_num_tokens > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError("slice: a count is no int32");
  }
  wire.set_max_num_tokens(static_cast<int32_t>(slice.max_num_tokens));
  wire.set_max_topk(slice.max_topk);
  PackSame(slice.send_rows, wire.mutable_send_rows());
  PackSame(slice.pair_local_expert, wire.mutable_pair_local_experts());
  PackSame(slice.pair_k, wire.mutable_pair_ks());
  PackSame(slice.pair_weights, wire.mutable_pair_weights());
  PackSame(slice.sum_weights, wire.mutable_sum_weights());
  PackSame(slice.gather_rows, wire.mutable_gather_rows());
  PackSame(slice.router_logits, wire.mutable_router_logits());
  return wire;
}

absl::StatusOr<DispatchMode> StrategyFromWire(v1::DispatchMode mode) {
  for (const DispatchMode known :
       {DispatchMode::kPassthrough, DispatchMode::kAllToAll, DispatchMode::kAllToAllFixedCapacity,
        DispatchMode::kAllGatherReduceScatter, DispatchMode::kAllGatherReduceScatterMonolithic,
        DispatchMode::kDirect}) {
    if (DispatchModeToWire(known) == mode) return known;
  }
  return InvalidFieldError("slice.strategy", static_cast<int>(mode), "a strategy");
}

absl::StatusOr<StepSlice> FromWire(const v1::StepSlice& wire) {
  StepSlice slice;
  StepHeader& header = slice.header;
  header.incarnation = wire.incarnation();
  header.epoch = wire.epoch();
  header.step = wire.step();
  header.dispatch_order = wire.dispatch_order();
  header.combine_order = wire.combine_order();
  header.model = wire.model();
  header.layer = wire.layer();
  const absl::StatusOr<DispatchMode> strategy = StrategyFromWire(wire.strategy());
  if (!strategy.ok()) return strategy.status();
  header.strategy = *strategy;
  if (wire.combine() != v1::COMBINE_PER_OWNER && wire.combine() != v1::COMBINE_PER_EXPERT) {
    return InvalidFieldError("slice.combine", static_cast<int>(wire.combine()), "1 or 2");
  }
  header.combine =
      wire.combine() == v1::COMBINE_PER_EXPERT ? CombineMode::kPerExpert : CombineMode::kSum;
  header.activation_dtype = DTypeFromWire(wire.shard().dtype());
  header.combine_dtype = DTypeFromWire(wire.combine_dtype());
  header.output_dtype = DTypeFromWire(wire.output_dtype());
  header.apply_router_weight_on_input = wire.apply_router_weight_on_input();
  header.include_shared_experts = wire.include_shared_experts();
  slice.send_counts = Unpack<int64_t>(wire.send_counts());
  slice.send_rows = Unpack<int32_t>(wire.send_rows());
  slice.recv_counts = Unpack<int64_t>(wire.recv_counts());
  slice.pair_offsets = Unpack<int64_t>(wire.pair_offsets());
  slice.pair_local_expert = Unpack<int32_t>(wire.pair_local_experts());
  slice.pair_k = Unpack<int32_t>(wire.pair_ks());
  slice.pair_weights = Unpack<float>(wire.pair_weights());
  slice.return_send_counts = Unpack<int64_t>(wire.return_send_counts());
  slice.return_recv_counts = Unpack<int64_t>(wire.return_recv_counts());
  slice.sum_offsets = Unpack<int64_t>(wire.sum_offsets());
  slice.sum_rows = Unpack<int64_t>(wire.sum_rows());
  slice.sum_weights = Unpack<float>(wire.sum_weights());
  slice.gather_counts = Unpack<int64_t>(wire.gather_counts());
  slice.gather_rows = Unpack<int32_t>(wire.gather_rows());
  slice.router_logits = Unpack<float>(wire.router_logits());
  slice.max_num_tokens = wire.max_num_tokens();
  slice.max_topk = wire.max_topk();
  return slice;
}

v1::Tensor RowsTensor(DType dtype, int64_t num_rows, int64_t hidden_size) {
  v1::Tensor tensor;
  tensor.set_dtype(DTypeToWire(dtype));
  tensor.add_shape(num_rows);
  tensor.add_shape(hidden_size);
  return tensor;
}

// Rows of an activation type, as many bytes as they say.
absl::Status CheckRows(const char* field, const v1::Tensor& tensor, int64_t data_bytes) {
  const DType dtype = DTypeFromWire(tensor.dtype());
  if (!IsActivationDType(dtype)) {
    return InvalidFieldError(absl::StrCat(field, ".dtype"), static_cast<int>(tensor.dtype()),
                             "an activation type");
  }
  if (tensor.shape_size() != 2 || tensor.shape(0) < 0 || tensor.shape(1) < 1) {
    return InvalidFieldError(absl::StrCat(field, ".shape"), tensor.ShortDebugString(),
                             "[rows, hidden_size]");
  }
  const std::optional<int64_t> size_bytes =
      CheckedSizeProduct({tensor.shape(0), tensor.shape(1), DTypeBytes(dtype)});
  if (!size_bytes.has_value() || *size_bytes != data_bytes) {
    return InvalidFieldError(
        absl::StrCat(field, ".data"), absl::StrCat(data_bytes, " bytes"),
        absl::StrCat(tensor.shape(0), " x ", tensor.shape(1), " ", std::string(DTypeName(dtype))));
  }
  return absl::OkStatus();
}

// The outermost message, the one in it, and the tensor in that, which `tensor` gives.
template <typename Outer, typename Inner>
absl::Status ParseHeads(const PayloadMessage& parts, Outer* outer, Inner* inner,
                        v1::Tensor* (Inner::*tensor)()) {
  if (outer->ParseFromString(parts.heads[0]) && inner->ParseFromString(parts.heads[1]) &&
      (inner->*tensor)()->ParseFromString(parts.heads[2])) {
    return absl::OkStatus();
  }
  return CallError(ErrorReason::kMalformedMessage, "a message of the rank link is malformed");
}

// What protobuf needs for one of these at most.
constexpr int64_t kMaxVarintBytes = 5;  // of an int32 that is not negative
constexpr int64_t kMaxHeaderBytes = 1024;

}  // namespace

absl::Status CheckFitsWire(const StepSlice& slice, const TokenShard& shard, int64_t hidden_size) {
  int64_t num_varints = 0;
  for (const std::vector<int64_t>* counts :
       {&slice.send_counts, &slice.recv_counts, &slice.pair_offsets, &slice.return_send_counts,
        &slice.return_recv_counts, &slice.sum_offsets, &slice.sum_rows, &slice.gather_counts}) {
    num_varints += static_cast<int64_t>(counts->size());
    for (const int64_t count : *counts) {
      if (count < 0 || count > std::numeric_limits<int32_t>::max()) return NoInt32(count);
    }
  }
  if (slice.max_num_tokens > std::numeric_limits<int32_t>::max()) {
    return NoInt32(slice.max_num_tokens);
  }
  for (const std::vector<int32_t>* ids :
       {&slice.send_rows, &slice.pair_local_expert, &slice.pair_k, &slice.gather_rows}) {
    num_varints += static_cast<int64_t>(ids->size());
  }
  const auto num_floats = static_cast<int64_t>(
      slice.pair_weights.size() + slice.sum_weights.size() + slice.router_logits.size());
  std::optional<int64_t> size_bytes =
      CheckedAdd(kMaxVarintBytes * num_varints + 4 * num_floats + kMaxHeaderBytes,
                 static_cast<int64_t>(slice.header.model.size()));
  for (const RowSpan& span : shard.rows) {
    const std::optional<int64_t> span_bytes =
        CheckedSizeProduct({span.num_rows, hidden_size, DTypeBytes(slice.header.activation_dtype)});
    if (!span_bytes.has_value()) return absl::InvalidArgumentError("shard: sizes overflow");
    size_bytes = CheckedAdd(*size_bytes, *span_bytes);
    if (!size_bytes.has_value()) break;
  }
  return CheckPayloadMessageSize(size_bytes.value_or(std::numeric_limits<int64_t>::max()));
}

absl::StatusOr<grpc::ByteBuffer> EncodeSlice(const StepSlice& slice, const TokenShard& shard,
                                             int64_t hidden_size, absl::Duration timeout) {
  const absl::StatusOr<v1::StepSlice> wire = ToWire(slice, timeout);
  if (!wire.ok()) return wire.status();
  std::vector<OutputSpan> spans;
  spans.reserve(shard.rows.size());
  for (size_t i = 0; i < shard.rows.size(); ++i) {
    const std::optional<int64_t> size_bytes = CheckedSizeProduct(
        {shard.rows[i].num_rows, hidden_size, DTypeBytes(slice.header.activation_dtype)});
    if (!size_bytes.has_value()) return absl::InvalidArgumentError("shard: sizes overflow");
    spans.push_back(
        {shard.rows[i].data, *size_bytes, i < shard.owners.size() ? shard.owners[i] : nullptr});
  }
  const v1::Tensor tensor =
      RowsTensor(slice.header.activation_dtype, slice.num_source_tokens, hidden_size);
  return EncodePayloadMessage(kSlicePath,
                              {"", wire->SerializeAsString(), tensor.SerializeAsString()}, spans);
}

absl::StatusOr<ReceivedCommand> DecodeCommand(grpc::ByteBuffer* message, Allocator* allocator) {
  absl::StatusOr<PayloadMessage> parts = DecodePayloadMessage(message, kSlicePath, allocator);
  if (!parts.ok()) return parts.status();
  ReceivedCommand command;
  v1::StepSlice wire;
  absl::Status status = ParseHeads(*parts, &command.other, &wire, &v1::StepSlice::mutable_shard);
  if (!status.ok() || parts->depth == 0) {
    if (!status.ok()) return status;
    return command;
  }
  command.other.Clear();
  status = CheckRows("slice.shard", wire.shard(), parts->payload_bytes);
  if (!status.ok()) return status;
  absl::StatusOr<StepSlice> slice = FromWire(wire);
  if (!slice.ok()) return slice.status();
  ReceivedSlice& received = command.slice.emplace();
  received.slice = *std::move(slice);
  received.slice.num_source_tokens = wire.shard().shape(0);
  received.hidden_size = wire.shard().shape(1);
  received.timeout = absl::Microseconds(wire.timeout_micros());
  received.shard_status = std::move(parts->payload_status);
  received.shard = std::move(parts->payload);
  return command;
}

absl::StatusOr<grpc::ByteBuffer> EncodeStepResult(const StepHeader& header, int64_t hidden_size,
                                                  const absl::StatusOr<RankStepResult>& result) {
  v1::RunStepsRequest request;
  v1::StepResult& wire = *request.mutable_result();
  wire.set_incarnation(header.incarnation);
  wire.set_epoch(header.epoch);
  wire.set_step(header.step);
  const absl::Status& status = result.ok() ? result->output_error : result.status();
  if (!status.ok()) {
    *wire.mutable_status() = ToRpcStatus(status);
    wire.set_ran_to_end(result.ok());
  }
  if (!result.ok()) return EncodeSmallMessage(request);
  wire.mutable_timings()->set_dispatch_micros(result->timings.dispatch_micros);
  wire.mutable_timings()->set_compute_micros(result->timings.compute_micros);
  wire.mutable_timings()->set_combine_micros(result->timings.combine_micros);
  wire.set_num_expert_rows(result->num_expert_rows);
  const RankTraffic& traffic = result->traffic;
  wire.mutable_bytes_sent()->Add(traffic.bytes_sent.begin(), traffic.bytes_sent.end());
  wire.mutable_wait_nanos()->Add(traffic.wait_nanos.begin(), traffic.wait_nanos.end());
  if (!status.ok()) return EncodeSmallMessage(request);
  const ShardOutput& output = result->output;
  const std::optional<int64_t> size_bytes =
      CheckedSizeProduct({output.num_rows, hidden_size, DTypeBytes(header.output_dtype)});
  if (!size_bytes.has_value()) return absl::InvalidArgumentError("output: sizes overflow");
  const OutputSpan span = {output.rows, *size_bytes, output.arena};
  const v1::Tensor tensor = RowsTensor(header.output_dtype, output.num_rows, hidden_size);
  return EncodePayloadMessage(kResultPath,
                              {"", wire.SerializeAsString(), tensor.SerializeAsString()},
                              absl::MakeConstSpan(&span, 1));
}

absl::StatusOr<ReceivedEvent> DecodeEvent(grpc::ByteBuffer* message, Allocator* allocator) {
  absl::StatusOr<PayloadMessage> parts = DecodePayloadMessage(message, kResultPath, allocator);
  if (!parts.ok()) return parts.status();
  ReceivedEvent event;
  v1::StepResult wire;
  absl::Status status = ParseHeads(*parts, &event.other, &wire, &v1::StepResult::mutable_output);
  if (!status.ok()) return status;
  if (parts->depth == 0) return event;
  event.other.Clear();
  ReceivedResult& received = event.result.emplace();
  received.incarnation = wire.incarnation();
  received.epoch = wire.epoch();
  received.step = wire.step();
  received.timings = {wire.timings().dispatch_micros(), wire.timings().compute_micros(),
                      wire.timings().combine_micros()};
  received.num_expert_rows = wire.num_expert_rows();
  received.traffic.bytes_sent.assign(wire.bytes_sent().begin(), wire.bytes_sent().end());
  received.traffic.wait_nanos.assign(wire.wait_nanos().begin(), wire.wait_nanos().end());
  received.ran_to_end = wire.ran_to_end();
  received.status = FromRpcStatus(wire.status());
  if (!received.status.ok()) return event;
  status = CheckRows("result.output", wire.output(), parts->payload_bytes);
  if (!status.ok()) return status;
  received.dtype = DTypeFromWire(wire.output().dtype());
  received.num_rows = wire.output().shape(0);
  received.hidden_size = wire.output().shape(1);
  if (!parts->payload_status.ok()) {
    received.status = NoMemory("the output of the step", parts->payload_status);
    received.ran_to_end = true;
  }
  received.output = std::move(parts->payload);
  return event;
}

}  // namespace expertmesh
