#include "server/ops/shown_text.h"

#include <algorithm>
#include <cstdint>

namespace expertmesh {
namespace {

// Bytes of the character that `text` begins with; 0: it begins with none that may be shown.
size_t CharacterBytes(absl::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<uint8_t>(text[i]); };
  if (byte(0) < 0x80) return byte(0) >= 0x20 && byte(0) != 0x7f ? 1 : 0;
  const size_t size = byte(0) >= 0xf0 ? 4 : byte(0) >= 0xe0 ? 3 : 2;
  if (byte(0) < 0xc2 || byte(0) > 0xf4 || size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, UTF-16's surrogates, what is above U+10FFFF, and C1 controls.
  const uint8_t lead = byte(0);
  const uint8_t next = byte(1);
  const bool is_barred = (lead == 0xe0 && next < 0xa0) || (lead == 0xed && next >= 0xa0) ||
                         (lead == 0xf0 && next < 0x90) || (lead == 0xf4 && next >= 0x90) ||
                         (lead == 0xc2 && next < 0xa0);
  return is_barred ? 0 : size;
}

}  // namespace

std::string ShownText(absl::string_view text, size_t max_bytes) {
  std::string shown;
  shown.reserve(std::min(text.size(), max_bytes) + 3);
  while (!text.empty()) {
    const size_t size = CharacterBytes(text);
    if (shown.size() + std::max<size_t>(size, 1) > max_bytes) return shown + "...";
    if (size == 0) {
      shown += '?';
    } else {
      shown.append(text.data(), size);
    }
    text.remove_prefix(std::max<size_t>(size, 1));
  }
  return shown;
}

}  // namespace expertmesh
