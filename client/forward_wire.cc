#include "client/forward_wire.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpc/slice.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/status.h>

#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client_error.h"

namespace expertmesh {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;
using google::protobuf::io::StringOutputStream;

// Field numbers of the payloads in tensor.proto and expert_service.proto.
constexpr int kTopKNumber = v1::ForwardRequest::kTopkFieldNumber;
constexpr int kTensorDataNumber = v1::Tensor::kDataFieldNumber;
constexpr int kHiddenStatesNumber = v1::ForwardRequest::kHiddenStatesFieldNumber;
constexpr int kOutputNumber = v1::ForwardResponse::kOutputFieldNumber;
static_assert(v1::Tensor::kDataFieldNumber == 15, "the payload's tag takes one byte");

int64_t ElementBytes(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT32:
      return 4;
    case v1::DATA_TYPE_FLOAT16:
    case v1::DATA_TYPE_BFLOAT16:
      return 2;
    default:
      return 0;
  }
}

absl::Status CheckTensor(const char* name, const TensorBytes& tensor, int64_t rows,
                         int64_t columns) {
  const int64_t element_bytes = ElementBytes(tensor.dtype);
  if (element_bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": dtype ",
                                                   v1::DataType_Name(tensor.dtype),
                                                   "; it must be float32, float16 or bfloat16"));
  }
  int64_t size_bytes = 0;
  if (rows < 0 || columns < 0 || __builtin_mul_overflow(rows, columns, &size_bytes) ||
      __builtin_mul_overflow(size_bytes, element_bytes, &size_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": shape [", rows, ", ", columns, "] has no size in bytes"));
  }
  if (size_bytes != tensor.size_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", tensor.size_bytes,
                                                   " bytes given; shape [", rows, ", ", columns,
                                                   "] has ", size_bytes));
  }
  if (tensor.data == nullptr && size_bytes > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": data is null for ", size_bytes, " bytes"));
  }
  return absl::OkStatus();
}

// Drops the transport's reference to the caller's memory.
void ReleaseOwner(void* owner) { delete static_cast<std::shared_ptr<const void>*>(owner); }

grpc::Slice PayloadSlice(const TensorBytes& tensor) {
  const size_t size = static_cast<size_t>(tensor.size_bytes);
  if (tensor.owner == nullptr) return grpc::Slice(tensor.data, size);
  return grpc::Slice(
      grpc_slice_new_with_user_data(const_cast<void*>(tensor.data), size, ReleaseOwner,
                                    new std::shared_ptr<const void>(tensor.owner)),
      grpc::Slice::STEAL_REF);
}

// Writes tag and length of a sub-message `number` that holds `head` followed by a bytes field of
// `data_bytes`, then `head`, then tag and length of that field; the bytes themselves follow in a
// slice of their own.
void WriteTensorHead(int number, const std::string& head, int64_t data_bytes,
                     CodedOutputStream& out) {
  const uint64_t length =
      head.size() + (data_bytes == 0
                         ? 0
                         : 1 + CodedOutputStream::VarintSize64(static_cast<uint64_t>(data_bytes)) +
                               static_cast<uint64_t>(data_bytes));
  out.WriteTag(WireFormatLite::MakeTag(number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
  out.WriteVarint64(length);
  out.WriteString(head);
  if (data_bytes == 0) return;
  out.WriteTag(
      WireFormatLite::MakeTag(kTensorDataNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
  out.WriteVarint64(static_cast<uint64_t>(data_bytes));
}

std::string TensorHead(v1::DataType dtype, int64_t rows, int64_t columns) {
  v1::Tensor head;
  head.set_dtype(dtype);
  head.add_shape(rows);
  head.add_shape(columns);
  return head.SerializeAsString();
}

// Packed sfixed32 and float have the bytes of a little-endian array.
template <typename T>
void WritePacked(int number, absl::Span<const T> values, CodedOutputStream& out) {
  static_assert(sizeof(T) == 4);
  if (values.empty()) return;
  out.WriteTag(WireFormatLite::MakeTag(number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
  out.WriteVarint64(values.size() * sizeof(T));
  out.WriteRaw(values.data(), static_cast<int>(values.size() * sizeof(T)));
}

absl::Status WriteTopK(const TopKRouting& routing, int64_t num_tokens, CodedOutputStream& out) {
  int64_t count = 0;
  if (routing.topk < 0 || num_tokens < 0 ||
      __builtin_mul_overflow(num_tokens, static_cast<int64_t>(routing.topk), &count) ||
      count != static_cast<int64_t>(routing.ids.size()) ||
      count != static_cast<int64_t>(routing.weights.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("topk: ", routing.ids.size(), " ids and ", routing.weights.size(),
                     " weights given; [", num_tokens, ", ", routing.topk, "] has ", count));
  }
  v1::TopK head_message;
  head_message.set_topk(routing.topk);
  const std::string head = head_message.SerializeAsString();
  uint64_t length = head.size();
  if (count > 0) {
    const uint64_t array_bytes = static_cast<uint64_t>(count) * 4;
    length += 2 * (1 + CodedOutputStream::VarintSize64(array_bytes) + array_bytes);
  }
  out.WriteTag(WireFormatLite::MakeTag(kTopKNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
  out.WriteVarint64(length);
  out.WriteString(head);
  WritePacked(v1::TopK::kIdsFieldNumber, routing.ids, out);
  WritePacked(v1::TopK::kWeightsFieldNumber, routing.weights, out);
  return absl::OkStatus();
}

absl::Status DecodeOutputTensor(CodedInputStream& in, ForwardOutput& result) {
  std::string rest;
  {
    StringOutputStream rest_stream(&rest);
    CodedOutputStream rest_out(&rest_stream);
    while (const uint32_t tag = in.ReadTag()) {
      if (tag !=
          WireFormatLite::MakeTag(kTensorDataNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED)) {
        if (!WireFormatLite::SkipField(&in, tag, &rest_out))
          return absl::DataLossError("malformed output tensor");
        continue;
      }
      uint32_t length = 0;
      if (!in.ReadVarint32(&length) || in.BytesUntilLimit() < static_cast<int64_t>(length)) {
        return absl::DataLossError("output.data is cut short");
      }
      result.output.resize(length);
      if (!in.ReadRaw(result.output.data(), static_cast<int>(length))) {
        return absl::DataLossError("output.data is cut short");
      }
    }
    // At the end of the stream ReadTag ends well even inside of a limit.
    if (!in.ConsumedEntireMessage() || in.BytesUntilLimit() != 0) {
      return absl::DataLossError("malformed output tensor");
    }
  }
  if (!result.response.mutable_output()->MergeFromString(rest)) {
    return absl::DataLossError("malformed output tensor");
  }
  return absl::OkStatus();
}

absl::Status CheckOutputSize(ForwardOutput& result) {
  const v1::Tensor& tensor = result.response.output();
  if (tensor.shape_size() == 0 && result.output.empty())
    return absl::OkStatus();  // validate_only, stats_only
  if (tensor.shape_size() != 2) {
    return absl::DataLossError(
        absl::StrCat("output has ", tensor.shape_size(), " dimensions, not 2"));
  }
  result.num_tokens = tensor.shape(0);
  result.hidden_size = tensor.shape(1);
  result.dtype = tensor.dtype();
  if (tensor.values_size() > 0)
    return absl::OkStatus();  // the caller asked for OUTPUT_FORMAT_VALUES
  TensorBytes bytes;
  bytes.dtype = tensor.dtype();
  bytes.data = result.output.data();
  bytes.size_bytes = static_cast<int64_t>(result.output.size());
  const absl::Status status = CheckTensor("output", bytes, result.num_tokens, result.hidden_size);
  return status.ok() ? status : absl::DataLossError(status.message());
}

// Reads up to the innermost limit of `in`, or to its end where there is none.
absl::StatusOr<ForwardOutput> DecodeResponse(CodedInputStream& in) {
  ForwardOutput result;
  std::string rest;
  {
    StringOutputStream rest_stream(&rest);
    CodedOutputStream rest_out(&rest_stream);
    while (const uint32_t tag = in.ReadTag()) {
      if (tag !=
          WireFormatLite::MakeTag(kOutputNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED)) {
        if (!WireFormatLite::SkipField(&in, tag, &rest_out))
          return absl::DataLossError("malformed ForwardResponse");
        continue;
      }
      int length = 0;
      if (!in.ReadVarintSizeAsInt(&length)) return absl::DataLossError("malformed ForwardResponse");
      const CodedInputStream::Limit limit = in.PushLimit(length);
      if (absl::Status status = DecodeOutputTensor(in, result); !status.ok()) return status;
      in.PopLimit(limit);
    }
    if (!in.ConsumedEntireMessage()) return absl::DataLossError("malformed ForwardResponse");
  }
  if (!result.response.MergeFromString(rest))
    return absl::DataLossError("malformed ForwardResponse");
  if (absl::Status status = CheckOutputSize(result); !status.ok()) return status;
  return result;
}

}  // namespace

absl::StatusOr<grpc::ByteBuffer> EncodeForwardRequest(const ForwardInput& input) {
  if (absl::Status status =
          CheckTensor("hidden_states", input.hidden_states, input.num_tokens, input.hidden_size);
      !status.ok()) {
    return status;
  }
  v1::ForwardRequest head;
  head.set_request_id(input.request_id);
  head.set_model(input.model);
  head.set_layer(input.layer);
  head.set_apply_router_weight_on_input(input.apply_router_weight_on_input);
  head.set_expected_fingerprint(input.expected_fingerprint);
  *head.mutable_options() = input.options;
  if (std::holds_alternative<ServerGateRouting>(input.routing)) head.mutable_server_gate();

  std::vector<grpc::Slice> slices;
  std::string text = head.SerializeAsString();
  if (const auto* logits = std::get_if<RouterLogitsRouting>(&input.routing)) {
    if (absl::Status status =
            CheckTensor("router_logits", logits->logits, input.num_tokens, logits->num_experts);
        !status.ok()) {
      return status;
    }
    {
      StringOutputStream stream(&text);
      CodedOutputStream out(&stream);
      WriteTensorHead(v1::ForwardRequest::kRouterLogitsFieldNumber,
                      TensorHead(logits->logits.dtype, input.num_tokens, logits->num_experts),
                      logits->logits.size_bytes, out);
    }
    slices.emplace_back(text);
    text.clear();
    slices.push_back(PayloadSlice(logits->logits));
  }
  {
    StringOutputStream stream(&text);
    CodedOutputStream out(&stream);
    if (const auto* topk = std::get_if<TopKRouting>(&input.routing)) {
      if (absl::Status status = WriteTopK(*topk, input.num_tokens, out); !status.ok())
        return status;
    }
    WriteTensorHead(kHiddenStatesNumber,
                    TensorHead(input.hidden_states.dtype, input.num_tokens, input.hidden_size),
                    input.hidden_states.size_bytes, out);
  }
  slices.emplace_back(text);
  slices.push_back(PayloadSlice(input.hidden_states));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

absl::StatusOr<ForwardOutput> DecodeForwardResponse(const grpc::ByteBuffer& bytes) {
  grpc::ByteBuffer source = bytes;  // shares the slices; the reader wants a mutable one
  grpc::ProtoBufferReader reader(&source);
  if (!reader.status().ok()) return absl::DataLossError(reader.status().error_message());
  CodedInputStream in(&reader);
  return DecodeResponse(in);
}

absl::StatusOr<grpc::ByteBuffer> EncodeForwardStreamRequest(uint64_t stream_seq,
                                                            int64_t timeout_micros,
                                                            const ForwardInput& input) {
  absl::StatusOr<grpc::ByteBuffer> request = EncodeForwardRequest(input);
  if (!request.ok()) return request.status();
  std::vector<grpc::Slice> slices;
  if (!request->Dump(&slices).ok()) return absl::InternalError("a message without slices");
  v1::ForwardStreamRequest envelope;
  envelope.set_stream_seq(stream_seq);
  envelope.set_timeout_micros(timeout_micros);
  std::string head = envelope.SerializeAsString();
  {
    StringOutputStream stream(&head);
    CodedOutputStream out(&stream);
    out.WriteTag(WireFormatLite::MakeTag(v1::ForwardStreamRequest::kRequestFieldNumber,
                                         WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
    out.WriteVarint64(request->Length());
  }
  slices.emplace(slices.begin(), head);
  return grpc::ByteBuffer(slices.data(), slices.size());
}

grpc::ByteBuffer EncodeForwardStreamCancel(uint64_t stream_seq) {
  v1::ForwardStreamRequest message;
  message.set_stream_seq(stream_seq);
  message.set_cancel(true);
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

absl::StatusOr<ForwardStreamAnswer> DecodeForwardStreamResponse(const grpc::ByteBuffer& bytes) {
  const auto malformed = [] { return absl::DataLossError("malformed ForwardStreamResponse"); };
  grpc::ByteBuffer source = bytes;
  grpc::ProtoBufferReader reader(&source);
  if (!reader.status().ok()) return absl::DataLossError(reader.status().error_message());
  CodedInputStream in(&reader);
  ForwardStreamAnswer answer;
  answer.result = absl::DataLossError("a ForwardStreamResponse without a result");
  std::string rest;
  {
    StringOutputStream rest_stream(&rest);
    CodedOutputStream rest_out(&rest_stream);
    while (const uint32_t tag = in.ReadTag()) {
      if (tag != WireFormatLite::MakeTag(v1::ForwardStreamResponse::kResponseFieldNumber,
                                         WireFormatLite::WIRETYPE_LENGTH_DELIMITED)) {
        if (!WireFormatLite::SkipField(&in, tag, &rest_out)) return malformed();
        continue;
      }
      int length = 0;
      if (!in.ReadVarintSizeAsInt(&length)) return malformed();
      const CodedInputStream::Limit limit = in.PushLimit(length);
      answer.result = DecodeResponse(in);
      // What of it was not read is of no use, but whose answer it is may stand behind it.
      if (!in.Skip(in.BytesUntilLimit())) return malformed();
      in.PopLimit(limit);
    }
    if (!in.ConsumedEntireMessage()) return malformed();
  }
  v1::ForwardStreamResponse envelope;
  if (!envelope.ParseFromString(rest)) return malformed();
  answer.stream_seq = envelope.stream_seq();
  if (envelope.has_error()) {
    const google::rpc::Status& error = envelope.error();
    answer.result = error.code() == 0
                        ? absl::DataLossError("an error with code OK")
                        : StatusOfServer(grpc::Status(static_cast<grpc::StatusCode>(error.code()),
                                                      error.message(), error.SerializeAsString()));
  }
  return answer;
}

}  // namespace expertmesh
