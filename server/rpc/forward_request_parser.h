#ifndef EXPERTMESH_SERVER_RPC_FORWARD_REQUEST_PARSER_H_
#define EXPERTMESH_SERVER_RPC_FORWARD_REQUEST_PARSER_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/buffer.h"
#include "server/rpc/forward_decoder.h"
#include "server/rpc/wire_reader.h"

namespace expertmesh {

// The bytes of one payload field. The message is read twice: first to measure, then, into a buffer
// of the exact size, to fill. A field that a later one overrides begins a new generation; only the
// last generation is copied, so that no byte is ever copied in vain.
class Payload {
 public:
  // Drops what was collected.
  void Clear() {
    ++generation_;
    size_bytes_ = 0;
  }

  // Takes the next `length` bytes of the reader.
  bool Append(WireReader* reader, int64_t length) {
    const int64_t offset = size_bytes_;
    size_bytes_ += length;
    if (!filling_ || generation_ != last_generation_) return reader->Skip(length);
    bytes_copied_ += length;
    return size_bytes_ <= buffer_.size_bytes() && reader->ReadRaw(buffer_.data() + offset, length);
  }

  // A packed field of 4-byte elements.
  bool AppendPacked32(WireReader* reader) {
    int64_t length;
    return reader->ReadLength(&length) && length % 4 == 0 && Append(reader, length);
  }

  absl::Status BeginFill(PayloadAllocator allocate) {
    if (size_bytes_ > 0) {
      absl::StatusOr<Buffer> buffer = allocate(size_bytes_);
      if (!buffer.ok()) return buffer.status();
      buffer_ = std::move(*buffer);
    }
    filling_ = true;
    last_generation_ = std::exchange(generation_, 0);
    size_bytes_ = 0;
    return absl::OkStatus();
  }

  // Adds the bytes that were copied to *bytes_copied.
  Buffer Take(int64_t* bytes_copied) {
    *bytes_copied += bytes_copied_;
    return std::move(buffer_);
  }

 private:
  Buffer buffer_;
  int64_t size_bytes_ = 0;
  int64_t bytes_copied_ = 0;
  int64_t generation_ = 0;
  int64_t last_generation_ = 0;
  bool filling_ = false;
};

// One ForwardRequest, merged from any number of occurrences.
class ForwardRequestParser {
 public:
  explicit ForwardRequestParser(const ForwardDecodeLimits& limits) : limits_(limits) {}

  // Reads one occurrence, up to the reader's innermost limit. False: malformed, or limit_error().
  bool Parse(WireReader* reader);

  // Everything was measured: allocates. The same occurrences are to be parsed again then.
  absl::Status BeginFill(PayloadAllocator allocate);

  DecodedForwardRequest Take();

  // Not OK when a bound of the limits was exceeded.
  const absl::Status& limit_error() const { return limit_error_; }

  // A string field of at most `max_bytes`.
  bool ParseString(WireReader* reader, absl::string_view field, int64_t max_bytes,
                   std::string* text);

 private:
  struct TensorParser {
    absl::string_view name;
    DecodedTensor decoded;
    Payload scales, values, data;

    void Clear() {
      decoded = DecodedTensor();
      scales.Clear();
      values.Clear();
      data.Clear();
    }
    DecodedTensor Take(int64_t* bytes_copied) {
      decoded.scales = scales.Take(bytes_copied);
      decoded.values = values.Take(bytes_copied);
      decoded.data = data.Take(bytes_copied);
      return std::move(decoded);
    }
  };

  template <typename Field>
  bool ParseMessage(WireReader* reader, Field field) {
    int64_t outer_limit;
    if (!reader->EnterMessage(&outer_limit)) return false;
    while (reader->remaining() > 0) {
      uint32_t tag;
      if (!reader->ReadTag(&tag) || !field(tag)) return false;
    }
    return reader->LeaveMessage(outer_limit);
  }

  bool ParseField(WireReader* reader, uint32_t tag);
  bool ParseTopK(WireReader* reader);
  bool ParseOptions(WireReader* reader);
  bool ParseTensor(WireReader* reader, TensorParser* tensor);
  bool ParseQuantization(WireReader* reader, TensorParser* tensor);
  bool AppendDim(WireReader* reader, TensorParser* tensor);
  void SelectRouting(v1::ForwardRequest::RoutingCase routing_case);

  const ForwardDecodeLimits& limits_;
  absl::Status limit_error_;
  DecodedForwardRequest decoded_;
  Payload topk_ids_, topk_weights_, adapter_index_;
  TensorParser router_logits_{"router_logits", {}, {}, {}, {}};
  TensorParser hidden_states_{"hidden_states", {}, {}, {}, {}};
};

// Reads of varint fields into the types that proto fields have.
bool ReadInt32(WireReader* reader, int32_t* value);
bool ReadInt64(WireReader* reader, int64_t* value);
bool ReadBool(WireReader* reader, bool* value);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_FORWARD_REQUEST_PARSER_H_
