#include "server/model/synthetic_tensor.h"

#include <cmath>
#include <cstring>
#include <vector>

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

constexpr int64_t kTableThreshold = 1 << 18;

// Calls element(i, draw) for i in [0, count) with 16 random bits each.
template <typename Element>
void ForEachDraw(uint64_t key, int64_t count, const Element& element) {
  constexpr int64_t kPerWord = 4;
  for (int64_t first = 0; first < count; first += kPerWord) {
    uint64_t bits = Mix(key + 0x9e3779b97f4a7c15u * static_cast<uint64_t>(first / kPerWord + 1));
    for (int64_t i = first; i < first + kPerWord && i < count; ++i) {
      element(i, static_cast<uint16_t>(bits));
      bits >>= 16;
    }
  }
}

}  // namespace

float SyntheticStddev(int64_t fan_in) { return 1.0f / std::sqrt(static_cast<float>(fan_in)); }

void FillSyntheticTensor(const SyntheticTensorId& id, float stddev, DType dtype, int64_t count,
                         std::byte* out) {
  const uint64_t key = StreamKey(id);
  // Uniform on (-b, b) has the standard deviation b / sqrt(3).
  const float step = stddev * std::sqrt(3.0f) / 32768.0f;
  const auto value = [step](uint16_t draw) {
    return (static_cast<float>(static_cast<int16_t>(draw)) + 0.5f) * step;
  };
  if (dtype == DType::kFloat32) {
    ForEachDraw(key, count, [&](int64_t i, uint16_t draw) {
      const float element = value(draw);
      std::memcpy(out + i * sizeof(element), &element, sizeof(element));
    });
    return;
  }
  if (count < kTableThreshold) {
    ForEachDraw(key, count,
                [&](int64_t i, uint16_t draw) { StoreFloat(out, dtype, i, value(draw)); });
    return;
  }
  // A large checkpoint is made of 65,536 values: rounding each once is much faster.
  std::vector<uint16_t> rounded(65536);
  for (int64_t draw = 0; draw < 65536; ++draw) {
    StoreFloat(rounded.data(), dtype, draw, value(static_cast<uint16_t>(draw)));
  }
  ForEachDraw(key, count, [&](int64_t i, uint16_t draw) {
    std::memcpy(out + i * sizeof(uint16_t), &rounded[draw], sizeof(uint16_t));
  });
}

}  // namespace expertmesh
