#include "server/rpc/forward_encoder.h"

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/support/slice.h"
#include "kernels/base/checked_math.h"
#include "server/ops/call_error.h"
#include "server/rpc/wire_reader.h"

namespace expertmesh {
namespace {

constexpr int64_t kMaxMessageBytes = std::numeric_limits<int32_t>::max();

void AppendVarint(uint64_t value, std::string* out) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

int64_t VarintBytes(uint64_t value) {
  int64_t size = 1;
  for (; value >= 0x80; value >>= 7) ++size;
  return size;
}

// The head of a length-delimited field.
void AppendFieldHead(uint32_t field, int64_t length, std::string* out) {
  AppendVarint(WireReader::MakeTag(field, WireReader::kLengthDelimited), out);
  AppendVarint(static_cast<uint64_t>(length), out);
}

int64_t FieldHeadBytes(uint32_t field, int64_t length) {
  return VarintBytes(WireReader::MakeTag(field, WireReader::kLengthDelimited)) +
         VarintBytes(static_cast<uint64_t>(length));
}

absl::Status TooLarge(int64_t size_bytes) {
  CallErrorDetails details;
  details.value = absl::StrCat(size_bytes);
  details.limit = absl::StrCat(kMaxMessageBytes);
  return CallError(
      ErrorReason::kMessageTooLarge,
      absl::StrCat("the answer would have ", size_bytes, " bytes; a message has at most ",
                   kMaxMessageBytes, ": ask for fewer tokens at a time"),
      std::move(details));
}

grpc::Slice ExternalSlice(const OutputSpan& span) {
  auto* owner = new std::shared_ptr<const void>(span.owner);
  return grpc::Slice(
      const_cast<std::byte*>(span.data), static_cast<size_t>(span.size_bytes),
      [](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); }, owner);
}

// `prefix`, then `header`, then the output, embedded in field `outer_field` of a message that
// begins with `outer_prefix`; or not embedded (0).
absl::StatusOr<grpc::ByteBuffer> Encode(const std::string& outer_prefix, uint32_t outer_field,
                                        const v1::ForwardResponse& header,
                                        const EncodedOutput* output) {
  const std::string header_bytes = header.SerializeAsString();
  std::string tensor_bytes;
  int64_t payload_bytes = 0;
  uint32_t payload_field = 0;
  std::vector<grpc::Slice> slices(1);
  if (output != nullptr) {
    tensor_bytes = output->tensor.SerializeAsString();
    for (const OutputSpan& span : output->spans) {
      const auto sum = CheckedAdd(payload_bytes, span.size_bytes);
      if (!sum.has_value()) return TooLarge(std::numeric_limits<int64_t>::max());
      payload_bytes = *sum;
    }
    payload_field = output->field == EncodedOutput::Field::kData ? v1::Tensor::kDataFieldNumber
                                                                 : v1::Tensor::kValuesFieldNumber;
  }
  // Before any further sum: below, no term is larger than this.
  if (payload_bytes > kMaxMessageBytes) return TooLarge(payload_bytes);

  int64_t tensor_size = static_cast<int64_t>(tensor_bytes.size());
  if (payload_bytes > 0)
    tensor_size += FieldHeadBytes(payload_field, payload_bytes) + payload_bytes;
  int64_t response_size = static_cast<int64_t>(header_bytes.size());
  if (output != nullptr) {
    response_size +=
        FieldHeadBytes(v1::ForwardResponse::kOutputFieldNumber, tensor_size) + tensor_size;
  }
  int64_t message_size = response_size;
  if (outer_field != 0) {
    message_size +=
        static_cast<int64_t>(outer_prefix.size()) + FieldHeadBytes(outer_field, response_size);
  }
  if (message_size > kMaxMessageBytes) return TooLarge(message_size);

  std::string head = outer_prefix;
  head.reserve(static_cast<size_t>(message_size - payload_bytes));
  if (outer_field != 0) AppendFieldHead(outer_field, response_size, &head);
  head += header_bytes;
  if (output != nullptr) {
    AppendFieldHead(v1::ForwardResponse::kOutputFieldNumber, tensor_size, &head);
    head += tensor_bytes;
    if (payload_bytes > 0) AppendFieldHead(payload_field, payload_bytes, &head);
    for (const OutputSpan& span : output->spans) {
      if (span.size_bytes > 0) slices.push_back(ExternalSlice(span));
    }
  }
  slices.front() = grpc::Slice(head.data(), head.size());
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace

absl::StatusOr<grpc::ByteBuffer> EncodeForwardResponse(const v1::ForwardResponse& header,
                                                       const EncodedOutput* output) {
  return Encode("", 0, header, output);
}

absl::StatusOr<grpc::ByteBuffer> EncodeForwardStreamResponse(uint64_t stream_seq,
                                                             const v1::ForwardResponse& header,
                                                             const EncodedOutput* output) {
  v1::ForwardStreamResponse prefix;
  prefix.set_stream_seq(stream_seq);
  return Encode(prefix.SerializeAsString(), v1::ForwardStreamResponse::kResponseFieldNumber, header,
                output);
}

grpc::ByteBuffer EncodeSmallMessage(const google::protobuf::MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace expertmesh
