#include "server/comm/payload_checksum.h"

#include <bit>
#include <cstring>

namespace expertmesh {
namespace {

// One-to-one in both arguments, so a difference in one word can never vanish again. The shift
// brings high bits back down, which the multiplication only moves up.
inline uint64_t Mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * 0x9e3779b97f4a7c15;
  return state ^ (state >> 32);
}

// Another function than Mix, or a bit in one lane would look like another bit in the next.
inline uint64_t MixLanes(uint64_t state, uint64_t lane) {
  state = (std::rotl(state, 27) ^ lane) * 0xbf58476d1ce4e5b9;
  return state ^ (state >> 32);
}

}  // namespace

void PayloadChecksum::Update(const std::byte* data, int64_t size_bytes) {
  static_assert(sizeof(lanes_) == kBlockBytes);
  size_bytes_ += static_cast<uint64_t>(size_bytes);
  // Independent chains hide the latency of a multiplication; in registers, for lanes_ might be
  // aliased by `data`. The build keeps the compiler from making vectors of them: there is no
  // multiplication of 64 bits in SSE2.
  uint64_t lanes[kNumLanes];
  std::memcpy(lanes, lanes_, sizeof(lanes));
  for (; size_bytes >= kBlockBytes; size_bytes -= kBlockBytes, data += kBlockBytes) {
#pragma GCC unroll 8
    for (int i = 0; i < kNumLanes; ++i) {
      uint64_t word;
      std::memcpy(&word, data + i * sizeof(word), sizeof(word));
      lanes[i] = Mix(lanes[i], word);
    }
  }
  if (size_bytes > 0) {
    uint64_t words[kNumLanes] = {};
    std::memcpy(words, data, static_cast<size_t>(size_bytes));
    for (int i = 0; i < kNumLanes; ++i) lanes[i] = Mix(lanes[i], words[i]);
  }
  std::memcpy(lanes_, lanes, sizeof(lanes));
}

uint64_t PayloadChecksum::Finish() const {
  uint64_t result = size_bytes_;
  for (const uint64_t lane : lanes_) result = MixLanes(result, lane);
  return result;
}

}  // namespace expertmesh
