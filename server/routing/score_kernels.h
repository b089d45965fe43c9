#ifndef EXPERTMESH_SERVER_ROUTING_SCORE_KERNELS_H_
#define EXPERTMESH_SERVER_ROUTING_SCORE_KERNELS_H_

#include <cstdint>
#include <vector>

namespace expertmesh {

// The inner loops of routing, on rows of float32 that are padded to whole lanes. Each is compiled
// for several instruction sets and chosen at run time; multiplications and additions are never
// fused and sums have kRouterLanes partial sums added in one fixed order, so the bytes are the same
// on every CPU and do not depend on how many rows there are.
//
// Plain functions of their arguments: thread safe, not blocking.
inline constexpr int64_t kRouterLanes = 16;

inline constexpr int64_t PaddedToRouterLanes(int64_t size) {
  return (size + kRouterLanes - 1) / kRouterLanes * kRouterLanes;
}

struct RowRange {
  float max = 0.0f;  // -inf padding aside; meaningless with has_nan
  bool has_nan = false;
};

// `padded_size` is a multiple of kRouterLanes, in all of them.
RowRange FindRange(const float* row, int64_t padded_size);

// exps[i] = exp(row[i] - max), relative error below 2^-22, 0 where that is below 2^-126; returns
// their sum. `max` must be finite. exps may be row.
float ExpRow(const float* row, float max, int64_t padded_size, float* exps);

// scores[i] = 1 / (1 + exp(-row[i])). scores may be row.
void SigmoidRow(const float* row, int64_t padded_size, float* scores);

// ids and top_values [topk] of the largest elements of row, largest first, equal ones by ascending
// id: row is written and restored. No NaN; 0 <= topk <= padded_size. False, with ids and values
// undefined, when fewer than topk elements are above -inf.
bool FindTopK(float* row, int64_t padded_size, int32_t topk, int32_t* ids, float* top_values);

// row[i] /= divisor; sums[i] = a[i] + b[i].
void DivideRow(float* row, int64_t padded_size, float divisor);
void AddRows(const float* a, const float* b, int64_t padded_size, float* sums);

// logits[t * logits_stride + e] = sum_k rows[t * padded_hidden + k] * gate[e * padded_hidden + k].
// num_experts is a multiple of kGateExpertBlock.
inline constexpr int64_t kGateExpertBlock = 4;
struct GateMatmulParams {
  const float* rows = nullptr;  // [num_tokens, padded_hidden]
  const float* gate = nullptr;  // [num_experts, padded_hidden]
  int64_t num_tokens = 0;
  int64_t num_experts = 0;
  int64_t padded_hidden = 0;
  int64_t logits_stride = 0;
  float* logits = nullptr;
};
void GateMatmul(const GateMatmulParams& params);

// The functions above for one instruction set.
struct ScoreKernels {
  const char* instruction_set;
  RowRange (*find_range)(const float*, int64_t);
  float (*exp_row)(const float*, float, int64_t, float*);
  void (*sigmoid_row)(const float*, int64_t, float*);
  bool (*find_topk)(float*, int64_t, int32_t, int32_t*, float*);
  void (*gate_matmul)(const GateMatmulParams&);
};

// Those that this CPU can run, the best one (which the functions above use) last.
std::vector<ScoreKernels> SupportedScoreKernels();

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_ROUTING_SCORE_KERNELS_H_
