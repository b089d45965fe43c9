#ifndef EXPERTMESH_SERVER_RPC_WIRE_READER_H_
#define EXPERTMESH_SERVER_RPC_WIRE_READER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "google/protobuf/io/zero_copy_stream.h"

namespace expertmesh {

// Reads protobuf's wire format from the chunks of a stream, accepting exactly what protobuf's own
// parser accepts (CodedInputStream differs: it takes tags of more than five bytes). Every function
// that returns bool returns false on malformed input or past the innermost limit, and the reader is
// of no further use then. Not thread safe; does not block unless the stream does.
class WireReader {
 public:
  enum WireType : uint32_t {
    kVarint = 0,
    kFixed64 = 1,
    kLengthDelimited = 2,
    kStartGroup = 3,
    kEndGroup = 4,
    kFixed32 = 5,
  };
  static constexpr uint32_t MakeTag(uint32_t field_number, WireType type) {
    return (field_number << 3) | type;
  }

  // Reads the first `size_bytes` bytes of `stream`, which outlives the reader.
  WireReader(google::protobuf::io::ZeroCopyInputStream* stream, int64_t size_bytes)
      : stream_(stream), limit_(size_bytes) {}
  WireReader(const WireReader&) = delete;
  WireReader& operator=(const WireReader&) = delete;

  // Bytes read so far, and bytes up to the innermost limit.
  int64_t position() const { return position_; }
  int64_t remaining() const { return limit_ - position_; }

  // Also false for a tag that no field can have: number 0, an end of a group, wire types 6 and 7.
  bool ReadTag(uint32_t* tag);
  bool ReadVarint(uint64_t* value);
  // A length prefix: at most remaining() and at most INT32_MAX - 16 (protobuf's bound).
  bool ReadLength(int64_t* length);
  // Copies the next `size` bytes, size >= 0.
  bool ReadRaw(void* destination, int64_t size);
  bool Skip(int64_t size);
  // A length-delimited field of at most `max_bytes`; a longer one is skipped, `text` is cleared and
  // `*size` alone tells. False where the bytes are not UTF-8 (not checked for a longer one).
  bool ReadUtf8(int64_t max_bytes, std::string* text, int64_t* size);
  // Skips the rest of a field whose tag was read; groups up to protobuf's depth of 100.
  bool SkipField(uint32_t tag);

  // Between these two the innermost limit is the end of a length-delimited field.
  bool EnterMessage(int64_t* outer_limit);
  // False when the inner message was not read to its end.
  bool LeaveMessage(int64_t outer_limit);

 private:
  bool NextChunk();
  bool ReadByte(uint8_t* byte);
  bool ReadAnyTag(uint32_t* tag);
  bool SkipGroup(uint32_t start_tag);

  google::protobuf::io::ZeroCopyInputStream* stream_;
  const uint8_t* cursor_ = nullptr;
  const uint8_t* chunk_end_ = nullptr;
  int64_t position_ = 0;
  int64_t limit_;
  int depth_left_ = 100;
};

// As proto3 demands of strings: no overlong forms, no surrogates, nothing above U+10FFFF.
bool IsValidUtf8(absl::string_view text);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_RPC_WIRE_READER_H_
