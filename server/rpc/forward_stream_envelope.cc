#include "server/rpc/forward_stream_envelope.h"

#include "absl/strings/str_cat.h"
#include "expertmesh/v1/expert_service.pb.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "server/ops/call_error.h"
#include "server/rpc/forward_request_parser.h"
#include "server/rpc/wire_reader.h"

namespace expertmesh {
namespace {

bool ReadEnvelope(WireReader* reader, ForwardStreamEnvelope* envelope) {
  while (reader->remaining() > 0) {
    uint32_t tag;
    if (!reader->ReadTag(&tag)) return false;
    bool ok;
    switch (tag) {
      case WireReader::MakeTag(v1::ForwardStreamRequest::kStreamSeqFieldNumber,
                               WireReader::kVarint):
        ok = reader->ReadVarint(&envelope->stream_seq);
        break;
      case WireReader::MakeTag(v1::ForwardStreamRequest::kTimeoutMicrosFieldNumber,
                               WireReader::kVarint):
        ok = ReadInt64(reader, &envelope->timeout_micros);
        break;
      case WireReader::MakeTag(v1::ForwardStreamRequest::kCancelFieldNumber, WireReader::kVarint):
        ok = ReadBool(reader, &envelope->cancel);
        break;
      default:
        ok = reader->SkipField(tag);
    }
    if (!ok) return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<ForwardStreamEnvelope> ReadForwardStreamEnvelope(grpc::ByteBuffer* message) {
  ForwardStreamEnvelope envelope;
  grpc::ProtoBufferReader stream(message);
  WireReader reader(&stream, static_cast<int64_t>(message->Length()));
  if (ReadEnvelope(&reader, &envelope)) return envelope;
  return CallError(
      ErrorReason::kMalformedMessage,
      absl::StrCat("a message of the stream is no ForwardStreamRequest: malformed at byte ",
                   reader.position(), " of ", message->Length()));
}

}  // namespace expertmesh
