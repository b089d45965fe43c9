#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/model/checkpoint_weight_source.h"
#include "server/routing/router.h"
#include "tests/golden/golden_fixture.h"

namespace expertmesh {
namespace {

// Transformers' own routers are the oracle: the checkpoint's configuration and gate, as model/
// reads them, must choose and weigh as the model's code does, from its logits and from its hidden
// states.
class RouterGoldenTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    fixture_ = LoadGoldenFixture(GetParam());
    absl::StatusOr<std::unique_ptr<CheckpointWeightSource>> source =
        CheckpointWeightSource::Open(fixture_.path);
    ASSERT_TRUE(source.ok()) << source.status();
    source_ = *std::move(source);
  }

  std::unique_ptr<Router> MakeRouter(const GoldenLayer& golden) {
    const LayerSpec* layer = source_->model().FindLayer(golden.index);
    EXPECT_NE(layer, nullptr);
    absl::StatusOr<LoadedGate> gate = source_->LoadGate(golden.index);
    EXPECT_TRUE(gate.ok()) << gate.status();
    absl::StatusOr<std::unique_ptr<Router>> router =
        NewRouter(source_->model(), *layer, std::make_unique<LoadedGate>(*std::move(gate)));
    EXPECT_TRUE(router.ok()) << router.status();
    return *std::move(router);
  }

  // As sets: the order of torch.topk(sorted=False) means nothing.
  void ExpectRouting(const GoldenLayer& golden, const std::vector<int32_t>& ids,
                     const std::vector<float>& weights, double tolerance) {
    for (int64_t t = 0; t < fixture_.num_tokens; ++t) {
      std::map<int32_t, double> expected;
      for (int32_t k = 0; k < golden.topk; ++k) {
        expected[golden.ids[t * golden.topk + k]] = golden.topk_weights.values[t * golden.topk + k];
      }
      for (int32_t k = 0; k < golden.topk; ++k) {
        const auto found = expected.find(ids[t * golden.topk + k]);
        ASSERT_NE(found, expected.end()) << "token " << t << " expert " << ids[t * golden.topk + k];
        EXPECT_NEAR(weights[t * golden.topk + k], found->second, tolerance) << "token " << t;
        expected.erase(found);
      }
    }
  }

  static DType TypeOf(const GoldenTensor& tensor) {
    if (tensor.dtype == "F32") return DType::kFloat32;
    return tensor.dtype == "F16" ? DType::kFloat16 : DType::kBFloat16;
  }

  GoldenFixture fixture_;
  std::unique_ptr<CheckpointWeightSource> source_;
};

INSTANTIATE_TEST_SUITE_P(Fixtures, RouterGoldenTest, testing::ValuesIn(GoldenFixtureNames()),
                         [](const auto& param) { return param.param; });

TEST_P(RouterGoldenTest, FromLogits) {
  ASSERT_FALSE(fixture_.layers.empty());
  for (const GoldenLayer& golden : fixture_.layers) {
    SCOPED_TRACE(golden.index);
    const std::unique_ptr<Router> router = MakeRouter(golden);
    std::vector<int32_t> ids(fixture_.num_tokens * golden.topk);
    std::vector<float> weights(ids.size());
    const absl::Status status =
        router->RouteLogits(reinterpret_cast<const std::byte*>(golden.router_logits.bytes.data()),
                            TypeOf(golden.router_logits), fixture_.num_tokens, absl::MakeSpan(ids),
                            absl::MakeSpan(weights));
    ASSERT_TRUE(status.ok()) << status;
    ExpectRouting(golden, ids, weights, golden.tolerance_weights_logits);
  }
}

TEST_P(RouterGoldenTest, ThroughTheGate) {
  for (const GoldenLayer& golden : fixture_.layers) {
    SCOPED_TRACE(golden.index);
    const std::unique_ptr<Router> router = MakeRouter(golden);
    std::vector<int32_t> ids(fixture_.num_tokens * golden.topk);
    std::vector<float> weights(ids.size());
    const RowSpan rows = {reinterpret_cast<const std::byte*>(golden.hidden_states.bytes.data()),
                          fixture_.num_tokens};
    const absl::Status status = router->RouteHidden({&rows, 1}, TypeOf(golden.hidden_states),
                                                    absl::MakeSpan(ids), absl::MakeSpan(weights));
    ASSERT_TRUE(status.ok()) << status;
    ExpectRouting(golden, ids, weights, golden.tolerance_weights_gate);
  }
}

}  // namespace
}  // namespace expertmesh
