#ifndef EXPERTMESH_TESTS_SERVER_ROUTING_ROUTER_FIXTURE_H_
#define EXPERTMESH_TESTS_SERVER_ROUTING_ROUTER_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "server/routing/router.h"
#include "tests/reference/reference_router.h"

namespace expertmesh {

using Scores = RouterSpec::Scores;
using GroupScore = RouterSpec::GroupScore;

struct Routing {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};
bool SameBytes(const Routing& a, const Routing& b);

LayerSpec Layer(int32_t num_experts, int32_t topk, const RouterSpec& spec);
std::unique_ptr<Router> MakeRouter(const LayerSpec& layer, std::unique_ptr<LoadedGate> gate,
                                   int64_t hidden_size = 1);
// Null when the bias is empty.
std::unique_ptr<LoadedGate> BiasOnly(std::vector<float> correction_bias);

absl::StatusOr<Routing> RouteFloats(const Router& router, const std::vector<float>& logits);
absl::StatusOr<Routing> RouteRows(const Router& router, const std::vector<RowSpan>& spans,
                                  DType dtype);

std::vector<float> RandomFloats(std::mt19937_64& random, int64_t size, float scale);
std::vector<double> Doubles(const std::vector<float>& values);
// The layer's rule as the oracle spells it.
ReferenceRouterRule ReferenceRule(const LayerSpec& layer, const std::vector<float>& bias);

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_ROUTING_ROUTER_FIXTURE_H_
