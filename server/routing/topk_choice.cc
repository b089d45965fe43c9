#include "server/routing/topk_choice.h"

#include <algorithm>
#include <limits>

namespace expertmesh {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Into a descending list of `count` values; behind its equals, so that ascending ids stay so.
inline void Insert(float value, int32_t id, int32_t count, int32_t* ids, float* top_values) {
  int32_t i = count;
  for (; i > 0 && value > top_values[i - 1]; --i) {
    top_values[i] = top_values[i - 1];
    ids[i] = ids[i - 1];
  }
  top_values[i] = value;
  ids[i] = id;
}

// The largest values of four interleaved parts: four short chains instead of one long one, and no
// branch that depends on the values.
float GroupScore(RouterSpec::GroupScore rule, const float* values, int64_t group_size) {
  constexpr int kParts = 4;
  float best[kParts], second[kParts];
  std::fill_n(best, kParts, kNegativeInfinity);
  std::fill_n(second, kParts, kNegativeInfinity);
  const auto add = [&best, &second](int part, float value) {
    second[part] = std::max(second[part], std::min(best[part], value));
    best[part] = std::max(best[part], value);
  };
  int64_t i = 0;
  for (; i + kParts <= group_size; i += kParts) {
    for (int part = 0; part < kParts; ++part) add(part, values[i + part]);
  }
  for (; i < group_size; ++i) add(0, values[i]);
  for (int part = 1; part < kParts; ++part) {
    add(0, best[part]);
    add(0, second[part]);
  }
  const bool sum = rule == RouterSpec::GroupScore::kSumOfTopTwo && group_size > 1;
  return sum ? best[0] + second[0] : best[0];
}

}  // namespace

void ChooseTopK(const float* values, int64_t size, int32_t topk, int32_t* ids, float* top_values) {
  if (topk == 0) return;
  for (int32_t i = 0; i < topk; ++i) Insert(values[i], i, i, ids, top_values);
  float threshold = top_values[topk - 1];
  for (int64_t i = topk; i < size; ++i) {
    if (values[i] <= threshold) continue;
    Insert(values[i], static_cast<int32_t>(i), topk - 1, ids, top_values);
    threshold = top_values[topk - 1];
  }
}

void MaskGroups(const RouterSpec& spec, int64_t group_size, float masked_value, float* values,
                float* group_scores) {
  const int32_t num_groups = spec.num_groups;
  for (int32_t g = 0; g < num_groups; ++g) {
    group_scores[g] = GroupScore(spec.group_score, values + g * group_size, group_size);
  }
  for (int32_t g = 0; g < num_groups; ++g) {
    int32_t num_better = 0;
    for (int32_t h = 0; h < g; ++h) num_better += group_scores[h] >= group_scores[g];
    for (int32_t h = g + 1; h < num_groups; ++h) num_better += group_scores[h] > group_scores[g];
    if (num_better < spec.topk_groups) continue;
    std::fill_n(values + g * group_size, group_size, masked_value);
  }
}

}  // namespace expertmesh
