#include "server/rpc/wire_reader.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace expertmesh {

bool WireReader::NextChunk() {
  const void* data = nullptr;
  int size = 0;
  do {
    if (!stream_->Next(&data, &size)) return false;
  } while (size == 0);
  cursor_ = static_cast<const uint8_t*>(data);
  chunk_end_ = cursor_ + size;
  return true;
}

inline bool WireReader::ReadByte(uint8_t* byte) {
  if (position_ >= limit_) return false;
  if (cursor_ == chunk_end_ && !NextChunk()) return false;
  *byte = *cursor_++;
  ++position_;
  return true;
}

bool WireReader::ReadAnyTag(uint32_t* tag) {
  uint32_t result = 0;
  for (int i = 0; i < 5; ++i) {
    uint8_t byte;
    if (!ReadByte(&byte)) return false;
    result |= static_cast<uint32_t>(byte & 0x7f) << (7 * i);
    if (byte < 0x80) {
      *tag = result;
      return (result >> 3) != 0 && (result & 7) <= kFixed32;
    }
  }
  return false;
}

bool WireReader::ReadTag(uint32_t* tag) { return ReadAnyTag(tag) && (*tag & 7) != kEndGroup; }

bool WireReader::ReadVarint(uint64_t* value) {
  uint64_t result = 0;
  for (int i = 0; i < 10; ++i) {
    uint8_t byte;
    if (!ReadByte(&byte)) return false;
    result |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
    if (byte < 0x80) {
      *value = result;
      return true;
    }
  }
  return false;
}

bool WireReader::ReadLength(int64_t* length) {
  constexpr uint64_t kMaxLength = std::numeric_limits<int32_t>::max() - 16;
  uint64_t result = 0;
  for (int i = 0; i < 5; ++i) {
    uint8_t byte;
    if (!ReadByte(&byte)) return false;
    result |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
    if (byte < 0x80) {
      if (result > kMaxLength || static_cast<int64_t>(result) > remaining()) return false;
      *length = static_cast<int64_t>(result);
      return true;
    }
  }
  return false;
}

bool WireReader::ReadRaw(void* destination, int64_t size) {
  if (size > remaining()) return false;
  auto* out = static_cast<uint8_t*>(destination);
  int64_t left = size;
  while (left > 0) {
    if (cursor_ == chunk_end_ && !NextChunk()) return false;
    const int64_t piece = std::min<int64_t>(left, chunk_end_ - cursor_);
    std::memcpy(out, cursor_, static_cast<size_t>(piece));
    out += piece;
    cursor_ += piece;
    left -= piece;
  }
  position_ += size;
  return true;
}

bool WireReader::Skip(int64_t size) {
  if (size > remaining()) return false;
  int64_t left = size;
  while (left > 0) {
    if (cursor_ == chunk_end_ && !NextChunk()) return false;
    const int64_t piece = std::min<int64_t>(left, chunk_end_ - cursor_);
    cursor_ += piece;
    left -= piece;
  }
  position_ += size;
  return true;
}

bool WireReader::ReadUtf8(int64_t max_bytes, std::string* text, int64_t* size) {
  if (!ReadLength(size)) return false;
  text->clear();
  if (*size > max_bytes) return Skip(*size);
  text->resize(static_cast<size_t>(*size));
  return ReadRaw(text->data(), *size) && IsValidUtf8(*text);
}

bool WireReader::SkipField(uint32_t tag) {
  switch (tag & 7) {
    case kVarint: {
      uint64_t ignored;
      return ReadVarint(&ignored);
    }
    case kFixed64:
      return Skip(8);
    case kLengthDelimited: {
      int64_t length;
      return ReadLength(&length) && Skip(length);
    }
    case kStartGroup:
      return SkipGroup(tag);
    case kFixed32:
      return Skip(4);
    default:
      return false;
  }
}

bool WireReader::SkipGroup(uint32_t start_tag) {
  if (--depth_left_ < 0) return false;
  const uint32_t end_tag = (start_tag & ~uint32_t{7}) | kEndGroup;
  while (true) {
    uint32_t tag;
    if (!ReadAnyTag(&tag)) return false;
    if ((tag & 7) == kEndGroup) {
      ++depth_left_;
      return tag == end_tag;
    }
    if (!SkipField(tag)) return false;
  }
}

bool WireReader::EnterMessage(int64_t* outer_limit) {
  int64_t length;
  if (!ReadLength(&length) || --depth_left_ < 0) return false;
  *outer_limit = limit_;
  limit_ = position_ + length;
  return true;
}

bool WireReader::LeaveMessage(int64_t outer_limit) {
  if (position_ != limit_) return false;
  limit_ = outer_limit;
  ++depth_left_;
  return true;
}

bool IsValidUtf8(absl::string_view text) {
  const auto* p = reinterpret_cast<const uint8_t*>(text.data());
  const auto* const end = p + text.size();
  while (p < end) {
    const uint8_t lead = *p++;
    if (lead < 0x80) continue;
    int trailing;
    uint8_t low = 0x80;
    uint8_t high = 0xbf;
    if (lead >= 0xc2 && lead <= 0xdf) {
      trailing = 1;
    } else if (lead >= 0xe0 && lead <= 0xef) {
      trailing = 2;
      if (lead == 0xe0) low = 0xa0;
      if (lead == 0xed) high = 0x9f;
    } else if (lead >= 0xf0 && lead <= 0xf4) {
      trailing = 3;
      if (lead == 0xf0) low = 0x90;
      if (lead == 0xf4) high = 0x8f;
    } else {
      return false;
    }
    if (end - p < trailing) return false;
    if (*p < low || *p > high) return false;
    for (int i = 1; i < trailing; ++i) {
      if (p[i] < 0x80 || p[i] > 0xbf) return false;
    }
    p += trailing;
  }
  return true;
}

}  // namespace expertmesh
