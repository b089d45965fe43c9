#include "server/rpc/forward_decoder.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "server/ops/call_error.h"
#include "server/rpc/forward_request_parser.h"
#include "server/rpc/wire_reader.h"

namespace expertmesh {
namespace {

constexpr uint32_t Varint(uint32_t field) {
  return WireReader::MakeTag(field, WireReader::kVarint);
}
constexpr uint32_t Bytes(uint32_t field) {
  return WireReader::MakeTag(field, WireReader::kLengthDelimited);
}

// Runs `parse(reader)` over the whole message.
template <typename Parse>
absl::Status ReadMessage(grpc::ByteBuffer* message, absl::string_view type,
                         const ForwardRequestParser& parser, Parse parse) {
  grpc::ProtoBufferReader stream(message);
  WireReader reader(&stream, static_cast<int64_t>(message->Length()));
  if (parse(&reader)) return absl::OkStatus();
  if (!parser.limit_error().ok()) return parser.limit_error();
  return CallError(ErrorReason::kMalformedMessage,
                   absl::StrCat("the message is no ", type, ": malformed at byte ",
                                reader.position(), " of ", message->Length()));
}

// Measures by one `parse(reader)` and fills by a second, unless `wants_payload()` says no between.
template <typename Parse, typename WantsPayload>
absl::Status Decode(grpc::ByteBuffer* message, absl::string_view type,
                    const ForwardDecodeLimits& limits, PayloadAllocator allocate,
                    ForwardRequestParser* parser, Parse parse, WantsPayload wants_payload) {
  const auto size_bytes = static_cast<int64_t>(message->Length());
  if (size_bytes > limits.max_message_bytes) {
    CallErrorDetails details;
    details.value = absl::StrCat(size_bytes);
    details.limit = absl::StrCat(limits.max_message_bytes);
    return CallError(ErrorReason::kMessageTooLarge,
                     absl::StrCat("the message has ", size_bytes, " bytes; this server takes ",
                                  limits.max_message_bytes),
                     std::move(details));
  }
  absl::Status status = ReadMessage(message, type, *parser, parse);
  if (!status.ok() || !wants_payload()) return status;
  status = parser->BeginFill(allocate);
  if (!status.ok()) return status;
  return ReadMessage(message, type, *parser, parse);
}

// One occurrence of an embedded ForwardRequest.
bool ParseEmbedded(WireReader* reader, ForwardRequestParser* parser) {
  int64_t outer_limit;
  return reader->EnterMessage(&outer_limit) && parser->Parse(reader) &&
         reader->LeaveMessage(outer_limit);
}

}  // namespace

absl::StatusOr<DecodedForwardRequest> DecodeForwardRequest(grpc::ByteBuffer* message,
                                                           const ForwardDecodeLimits& limits,
                                                           PayloadAllocator allocate) {
  ForwardRequestParser parser(limits);
  const absl::Status status = Decode(
      message, "ForwardRequest", limits, allocate, &parser,
      [&](WireReader* reader) { return parser.Parse(reader); }, [] { return true; });
  if (!status.ok()) return status;
  return parser.Take();
}

absl::StatusOr<DecodedForwardStreamRequest> DecodeForwardStreamRequest(
    grpc::ByteBuffer* message, const ForwardDecodeLimits& limits, PayloadAllocator allocate) {
  ForwardRequestParser parser(limits);
  DecodedForwardStreamRequest decoded;
  const auto parse = [&](WireReader* reader) {
    while (reader->remaining() > 0) {
      uint32_t tag;
      if (!reader->ReadTag(&tag)) return false;
      bool ok = false;
      switch (tag) {
        case Varint(v1::ForwardStreamRequest::kStreamSeqFieldNumber):
          ok = reader->ReadVarint(&decoded.stream_seq);
          break;
        case Varint(v1::ForwardStreamRequest::kTimeoutMicrosFieldNumber):
          ok = ReadInt64(reader, &decoded.timeout_micros);
          break;
        case Varint(v1::ForwardStreamRequest::kCancelFieldNumber):
          ok = ReadBool(reader, &decoded.cancel);
          break;
        case Bytes(v1::ForwardStreamRequest::kTraceparentFieldNumber):
          ok = parser.ParseString(reader, "traceparent", limits.max_name_bytes,
                                  &decoded.traceparent);
          break;
        case Bytes(v1::ForwardStreamRequest::kRequestFieldNumber):
          decoded.has_request = true;
          ok = ParseEmbedded(reader, &parser);
          break;
        default:
          ok = reader->SkipField(tag);
      }
      if (!ok) return false;
    }
    return true;
  };
  const absl::Status status = Decode(message, "ForwardStreamRequest", limits, allocate, &parser,
                                     parse, [&] { return !decoded.cancel; });
  if (!status.ok()) return status;
  decoded.request = parser.Take();
  return decoded;
}

absl::StatusOr<DecodedExplainRequest> DecodeExplainRequest(grpc::ByteBuffer* message,
                                                           const ForwardDecodeLimits& limits,
                                                           PayloadAllocator allocate) {
  ForwardRequestParser parser(limits);
  DecodedExplainRequest decoded;
  const auto parse = [&](WireReader* reader) {
    while (reader->remaining() > 0) {
      uint32_t tag;
      if (!reader->ReadTag(&tag)) return false;
      bool ok = false;
      switch (tag) {
        case Bytes(v1::ExplainRequest::kRequestFieldNumber):
          decoded.has_request = true;
          ok = ParseEmbedded(reader, &parser);
          break;
        case Varint(v1::ExplainRequest::kMaxTokensFieldNumber):
          ok = ReadInt32(reader, &decoded.max_tokens);
          break;
        default:
          ok = reader->SkipField(tag);
      }
      if (!ok) return false;
    }
    return true;
  };
  const absl::Status status =
      Decode(message, "ExplainRequest", limits, allocate, &parser, parse, [] { return true; });
  if (!status.ok()) return status;
  decoded.request = parser.Take();
  return decoded;
}

}  // namespace expertmesh
