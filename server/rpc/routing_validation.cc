#include "server/rpc/routing_validation.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

template <typename T>
T Element(const Buffer& buffer, int64_t index) {
  T value;
  std::memcpy(&value, buffer.data() + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

}  // namespace

absl::StatusOr<TopKSummary> ValidateTopK(int32_t topk, const Buffer& topk_ids,
                                         const Buffer& topk_weights, const TopKRules& rules) {
  if (topk < 0 || topk > rules.max_topk) {
    return InvalidFieldError("topk.topk", topk, absl::StrCat("0 to ", rules.max_topk));
  }
  const std::optional<int64_t> num_pairs = CheckedMul(rules.num_tokens, topk);
  const std::string count_limit = absl::StrCat(num_pairs.value_or(0), " elements (",
                                               rules.num_tokens, " tokens, topk ", topk, ")");
  if (num_pairs != topk_ids.size_bytes() / 4) {
    return InvalidFieldError("topk.ids", absl::StrCat(topk_ids.size_bytes() / 4, " elements"),
                             count_limit);
  }
  if (num_pairs != topk_weights.size_bytes() / 4) {
    return InvalidFieldError("topk.weights",
                             absl::StrCat(topk_weights.size_bytes() / 4, " elements"), count_limit);
  }
  TopKSummary summary;
  for (int64_t token = 0; token < rules.num_tokens; ++token) {
    int64_t token_pairs = 0;
    for (int64_t i = token * topk; i < (token + 1) * topk; ++i) {
      const int32_t id = Element<int32_t>(topk_ids, i);
      if (id == -1) continue;
      if (id < -1 || id >= rules.num_experts) {
        return InvalidFieldError(absl::StrCat("topk.ids[", i, "]"), id,
                                 absl::StrCat("-1 to ", rules.num_experts - 1));
      }
      const float weight = Element<float>(topk_weights, i);
      if (!std::isfinite(weight)) {
        return InvalidFieldError(absl::StrCat("topk.weights[", i, "]"), weight, "a finite number");
      }
      if (rules.weight_dtype != DType::kFloat32 && !IsFiniteIn(rules.weight_dtype, weight)) {
        return InvalidFieldError(
            absl::StrCat("topk.weights[", i, "]"), weight,
            absl::StrCat("a number that is finite in ", std::string(DTypeName(rules.weight_dtype)),
                         ", as it is applied to the input"));
      }
      ++token_pairs;
    }
    if (token_pairs == 0) {
      ++summary.num_tokens_without_expert;
      continue;
    }
    summary.num_pairs += token_pairs;
    std::vector<RowRun>& runs = summary.rows_with_expert;
    if (!runs.empty() && runs.back().first_row + runs.back().num_rows == token) {
      ++runs.back().num_rows;
    } else {
      runs.push_back({token, 1});
    }
  }
  return summary;
}

absl::Status ValidateAdapterIndex(const Buffer& adapter_index, int64_t num_tokens,
                                  int64_t num_adapters) {
  const int64_t count = adapter_index.size_bytes() / 4;
  if (count != 0 && count != num_tokens) {
    return InvalidFieldError("adapter_index", absl::StrCat(count, " elements"),
                             absl::StrCat("0 or ", num_tokens, " elements, one for each token"));
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t index = Element<int32_t>(adapter_index, i);
    if (index < -1 || index >= num_adapters) {
      return InvalidFieldError(absl::StrCat("adapter_index[", i, "]"), index,
                               num_adapters == 0 ? "-1" : absl::StrCat("-1 to ", num_adapters - 1));
    }
  }
  return absl::OkStatus();
}

}  // namespace expertmesh
