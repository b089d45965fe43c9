#include "server/model/synthetic_tensor.h"

#include <cmath>

namespace expertmesh {
namespace {

// The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t StreamKey(const SyntheticTensorId& id) {
  uint64_t key = Mix(id.seed + 0x9e3779b97f4a7c15u);
  key = Mix(key ^ static_cast<uint32_t>(id.layer_index));
  key = Mix(key ^ static_cast<uint32_t>(id.expert_id));
  return Mix(key ^ static_cast<uint8_t>(id.part));
}

}  // namespace

float SyntheticStddev(int64_t fan_in) { return 1.0f / std::sqrt(static_cast<float>(fan_in)); }

void FillSyntheticTensor(const SyntheticTensorId& id, float stddev, DType dtype, int64_t count,
                         std::byte* out) {
  const uint64_t key = StreamKey(id);
  // Uniform on (-b, b) has the standard deviation b / sqrt(3).
  const float step = stddev * std::sqrt(3.0f) / 32768.0f;
  constexpr int64_t kPerDraw = 4;
  for (int64_t first = 0; first < count; first += kPerDraw) {
    uint64_t bits = Mix(key + 0x9e3779b97f4a7c15u * static_cast<uint64_t>(first / kPerDraw + 1));
    for (int64_t i = first; i < first + kPerDraw && i < count; ++i) {
      const auto draw = static_cast<int16_t>(bits & 0xffff);
      bits >>= 16;
      StoreFloat(out, dtype, i, (static_cast<float>(draw) + 0.5f) * step);
    }
  }
}

}  // namespace expertmesh
