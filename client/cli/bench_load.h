#ifndef EXPERTMESH_CLIENT_CLI_BENCH_LOAD_H_
#define EXPERTMESH_CLIENT_CLI_BENCH_LOAD_H_

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cli/forward_job.h"

namespace expertmesh {

// How the experts of a token are drawn, without repetition within a token.
enum class RoutingSkew {
  kUniform,  // every expert alike
  kZipf,     // expert e as 1 / (e + 1), the ids shuffled by the seed: a few hot experts
  kOneHot,  // the first expert in every token, the rest uniform: one rank gets a row of every token
};
absl::StatusOr<RoutingSkew> RoutingSkewFromName(absl::string_view name);

struct BenchLoadOptions {
  std::vector<int32_t> layers;  // requests take them in turn; empty: all that the model has
  int64_t tokens_per_call = 16;
  int topk = 0;  // 0: the model's own
  DType dtype = DType::kBFloat16;
  RoutingSkew skew = RoutingSkew::kUniform;
  uint64_t seed = 1;
  int num_requests = 64;  // different ones, used again and again
};

// Draws `topk` distinct experts of `num_experts` per token (more than that repeat from the start)
// into ids [topk].
class ExpertDrawer {
 public:
  ExpertDrawer(int32_t num_experts, RoutingSkew skew, uint64_t seed);
  void Draw(int topk, std::mt19937_64& random, int32_t* ids);

 private:
  const RoutingSkew skew_;
  std::vector<double> weights_;    // [num_experts]
  std::vector<int32_t> order_;     // [num_experts] which expert has which weight
  std::vector<double> remaining_;  // scratch of Draw
};

// Requests to send, made before the clock runs; their tensors have owners, so that sending copies
// nothing. INVALID_ARGUMENT for a layer that the model does not have or sizes that are not
// positive.
absl::StatusOr<std::vector<std::unique_ptr<ForwardJob>>> MakeBenchLoad(
    const v1::GetModelResponse& model, const BenchLoadOptions& options);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_BENCH_LOAD_H_
