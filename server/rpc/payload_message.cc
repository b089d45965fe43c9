#include "server/rpc/payload_message.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "grpcpp/support/slice.h"
#include "kernels/base/checked_math.h"
#include "server/ops/call_error.h"
#include "server/rpc/wire_reader.h"

namespace expertmesh {
namespace {

constexpr int kDepth = 3;
constexpr int64_t kMaxMessageBytes = std::numeric_limits<int32_t>::max();

absl::Status TooLarge(int64_t size_bytes) {
  return CallError(ErrorReason::kMessageTooLarge,
                   absl::StrCat("a rank's part of a step would have ", size_bytes,
                                " bytes; a message has at most ", kMaxMessageBytes));
}

std::string FieldHead(uint32_t field, int64_t length) {
  std::string head;
  for (uint64_t value : {uint64_t{WireReader::MakeTag(field, WireReader::kLengthDelimited)},
                         static_cast<uint64_t>(length)}) {
    for (; value >= 0x80; value >>= 7) head.push_back(static_cast<char>(value | 0x80));
    head.push_back(static_cast<char>(value));
  }
  return head;
}

grpc::Slice SliceOf(const OutputSpan& span) {
  if (span.owner == nullptr) return grpc::Slice(span.data, static_cast<size_t>(span.size_bytes));
  auto* owner = new std::shared_ptr<const void>(span.owner);
  return grpc::Slice(
      const_cast<std::byte*>(span.data), static_cast<size_t>(span.size_bytes),
      [](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); }, owner);
}

// Which bytes of a message belong to which head, or to the payload (kDepth).
struct Range {
  int owner = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

class Splitter {
 public:
  explicit Splitter(const PayloadPath& path) : path_(path) {}

  // One message on the way, up to the reader's limit.
  bool Scan(WireReader* reader, int level) {
    while (reader->remaining() > 0) {
      const int64_t begin = reader->position();
      uint32_t tag;
      if (!reader->ReadTag(&tag)) return false;
      if (tag != WireReader::MakeTag(path_[level], WireReader::kLengthDelimited)) {
        if (!reader->SkipField(tag)) return false;
        Add(level, begin, reader->position());
        continue;
      }
      depth_ = std::max(depth_, level + 1);
      if (level == kDepth - 1) {
        int64_t length;
        if (!reader->ReadLength(&length)) return false;
        // The last one wins.
        if (payload_.has_value()) ranges_[*payload_].end = ranges_[*payload_].begin;
        if (payload_.has_value() && *payload_ + 1 == ranges_.size()) ranges_.pop_back();
        payload_ = ranges_.size();
        ranges_.push_back({kDepth, reader->position(), reader->position() + length});
        if (!reader->Skip(length)) return false;
      } else {
        int64_t outer_limit;
        if (!reader->EnterMessage(&outer_limit) || !Scan(reader, level + 1) ||
            !reader->LeaveMessage(outer_limit)) {
          return false;
        }
      }
    }
    return true;
  }

  int depth() const { return depth_; }
  const std::vector<Range>& ranges() const { return ranges_; }

 private:
  void Add(int owner, int64_t begin, int64_t end) {
    if (!ranges_.empty() && ranges_.back().owner == owner && ranges_.back().end == begin) {
      ranges_.back().end = end;
    } else {
      ranges_.push_back({owner, begin, end});
    }
  }

  const PayloadPath& path_;
  int depth_ = 0;
  std::vector<Range> ranges_;
  std::optional<size_t> payload_;  // in ranges_
};

}  // namespace

absl::Status CheckPayloadMessageSize(int64_t size_bytes) {
  return size_bytes <= kMaxMessageBytes ? absl::OkStatus() : TooLarge(size_bytes);
}

absl::StatusOr<grpc::ByteBuffer> EncodePayloadMessage(const PayloadPath& path,
                                                      const PayloadHeads& heads,
                                                      absl::Span<const OutputSpan> payload) {
  int64_t size_bytes = 0;
  for (const OutputSpan& span : payload) {
    const auto sum = CheckedAdd(size_bytes, span.size_bytes);
    if (!sum.has_value() || *sum > kMaxMessageBytes) {
      return TooLarge(sum.value_or(std::numeric_limits<int64_t>::max()));
    }
    size_bytes = *sum;
  }
  // From the inside out.
  std::string head;
  for (int level = kDepth - 1; level >= 0; --level) {
    const std::string field_head = FieldHead(path[level], size_bytes);
    size_bytes += static_cast<int64_t>(heads[level].size() + field_head.size());
    head = absl::StrCat(heads[level], field_head, head);
  }
  if (absl::Status status = CheckPayloadMessageSize(size_bytes); !status.ok()) return status;
  std::vector<grpc::Slice> slices;
  slices.reserve(payload.size() + 1);
  slices.emplace_back(head.data(), head.size());
  for (const OutputSpan& span : payload) {
    if (span.size_bytes > 0) slices.push_back(SliceOf(span));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

absl::StatusOr<PayloadMessage> DecodePayloadMessage(grpc::ByteBuffer* message,
                                                    const PayloadPath& path, Allocator* allocator) {
  const auto size_bytes = static_cast<int64_t>(message->Length());
  Splitter splitter(path);
  {
    grpc::ProtoBufferReader stream(message);
    WireReader reader(&stream, size_bytes);
    if (size_bytes > kMaxMessageBytes || !splitter.Scan(&reader, 0)) {
      return CallError(ErrorReason::kMalformedMessage,
                       absl::StrCat("a message of the rank link is malformed at byte ",
                                    reader.position(), " of ", size_bytes));
    }
  }
  PayloadMessage parts;
  parts.depth = splitter.depth();
  std::array<int64_t, kDepth + 1> sizes = {};
  for (const Range& range : splitter.ranges()) sizes[range.owner] += range.end - range.begin;
  for (int level = 0; level < kDepth; ++level) {
    parts.heads[level].resize(static_cast<size_t>(sizes[level]));
  }
  parts.payload_bytes = sizes[kDepth];
  if (parts.payload_bytes > 0) {
    absl::StatusOr<Buffer> buffer = allocator->Allocate(parts.payload_bytes);
    if (buffer.ok()) {
      parts.payload = *std::move(buffer);
    } else {
      parts.payload_status = buffer.status();
    }
  }
  std::array<int64_t, kDepth + 1> filled = {};
  grpc::ProtoBufferReader stream(message);
  WireReader reader(&stream, size_bytes);
  for (const Range& range : splitter.ranges()) {
    if (range.owner == kDepth && !parts.payload_status.ok()) continue;
    const int64_t length = range.end - range.begin;
    char* const destination = range.owner == kDepth ? reinterpret_cast<char*>(parts.payload.data())
                                                    : parts.heads[range.owner].data();
    if (!reader.Skip(range.begin - reader.position()) ||
        !reader.ReadRaw(destination + filled[range.owner], length)) {
      return absl::InternalError("a message changed while it was read");
    }
    filled[range.owner] += length;
  }
  return parts;
}

}  // namespace expertmesh
