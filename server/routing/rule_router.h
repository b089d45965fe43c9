#ifndef EXPERTMESH_SERVER_ROUTING_RULE_ROUTER_H_
#define EXPERTMESH_SERVER_ROUTING_RULE_ROUTER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "server/routing/router.h"

namespace expertmesh {

// Router for every rule that RouterSpec can say, in float32 on the calling thread. Experts are
// chosen by the scores, by the biased scores if there is a correction bias, and by the logits
// themselves where a score only grows with its logit: then no rounding or saturation makes ties
// that the logits do not have.
class RuleRouter : public Router {
 public:
  // As NewRouter, which checks the arguments.
  RuleRouter(int64_t hidden_size, const LayerSpec& layer, std::unique_ptr<LoadedGate> gate);

  const LayerSpec& layer() const override { return layer_; }
  absl::Status RouteLogits(const std::byte* logits, DType dtype, int64_t num_tokens,
                           absl::Span<int32_t> topk_ids,
                           absl::Span<float> topk_weights) const override;
  absl::Status RouteHidden(absl::Span<const RowSpan> hidden_states, DType dtype,
                           absl::Span<int32_t> topk_ids,
                           absl::Span<float> topk_weights) const override;
  absl::Status ComputeLogits(absl::Span<const RowSpan> hidden_states, DType dtype,
                             absl::Span<float> logits) const override;

 private:
  struct Scratch;

  // Calls visit(token, logits [num_logits_]) for each token in turn, until it fails.
  absl::Status ForEachLogits(
      absl::Span<const RowSpan> hidden_states, DType dtype,
      absl::FunctionRef<absl::Status(int64_t token, const float* logits)> visit) const;

  absl::Status CheckSizes(int64_t num_tokens, absl::Span<const int32_t> topk_ids,
                          absl::Span<const float> topk_weights) const;
  // scratch.logits holds one token's logits, padded with -inf. False: these give no finite weights.
  bool RouteRow(Scratch& scratch, int32_t* topk_ids, float* topk_weights) const;
  // Fills scratch.scores (still to be divided by scratch.scores_divisor) and returns what to choose
  // by: an array [padded_logits_].
  float* ScoreRow(float max, Scratch& scratch) const;
  // scratch.top_values holds the chosen logits.
  void WeighChosenLogits(const int32_t* ids, Scratch& scratch, float* weights) const;
  void WeighSparseMixer(const int32_t* ids, const Scratch& scratch, float* weights) const;
  void FinishWeights(float* weights) const;

  const LayerSpec layer_;
  const int64_t hidden_size_;
  const int64_t num_logits_;  // num_experts + num_zero_experts
  const int64_t padded_logits_;
  // Whether all scores are needed, or the chosen logits alone give the weights.
  const bool needs_scores_;
  const bool chooses_by_scores_;
  bool has_gate_ = false;
  int64_t padded_hidden_ = 0;
  std::vector<float> gate_;             // [padded_logits_, padded_hidden_], zeros where padded
  std::vector<float> gate_bias_;        // [num_logits_] or empty
  std::vector<float> correction_bias_;  // [padded_logits_] or empty
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_ROUTING_RULE_ROUTER_H_
