#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/planning/monolithic_plan.h"
#include "server/routing/router.h"
#include "tests/server/cluster/random_moe.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

// Ranks, combine mode, weight on the input, shared experts.
class MonolithicStepTest
    : public ::testing::TestWithParam<std::tuple<int32_t, CombineMode, bool, bool>> {
 protected:
  void MakeModel(int32_t num_experts, int64_t num_tokens, uint64_t seed) {
    RandomMoeShape shape{24, 20, num_experts, 3, DType::kBFloat16, Activation::kSiluMul};
    shape.shared_intermediate_size = 12;
    moe_ = std::make_unique<RandomMoe>(shape, seed);
    tokens_ = std::make_unique<RandomTokens>(*moe_, num_tokens, DType::kBFloat16, seed);
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    logits_.resize(num_tokens * num_experts);
    for (float& logit : logits_) logit = normal(random);
    const ModelSpec& model = moe_->source->model();
    const LayerSpec& layer = model.layers[0];
    const std::unique_ptr<Router> router = *NewRouter(model, layer, nullptr);
    tokens_->routing.topk = layer.topk;
    tokens_->routing.topk_ids.resize(num_tokens * layer.topk);
    tokens_->routing.topk_weights.resize(num_tokens * layer.topk);
    EXPECT_TRUE(router
                    ->RouteLogits(reinterpret_cast<const std::byte*>(logits_.data()),
                                  DType::kFloat32, num_tokens,
                                  absl::MakeSpan(tokens_->routing.topk_ids),
                                  absl::MakeSpan(tokens_->routing.topk_weights))
                    .ok());
    const auto [num_ranks, combine, weight_on_input, shared] = GetParam();
    choices_.combine = combine;
    choices_.weight_on_input = weight_on_input;
    choices_.include_shared_experts = shared;
    choices_.combine_dtype = DType::kFloat16;
    choices_.output_dtype = DType::kBFloat16;
    choices_.shard_sizes = MakeRandomShardSizes(random, num_tokens, num_ranks);
    LocalExpertGroupOptions options;
    options.num_ranks = num_ranks;
    std::vector<int32_t> owners(num_experts);
    for (int32_t& owner : owners) owner = static_cast<int32_t>(random() % num_ranks);
    options.place = [owners](const ModelSpec&, const LayerSpec&, int32_t ep_size) {
      return Placement::FromOwners(owners, ep_size);
    };
    group_ = LoadGroup(*moe_, options);
  }

  // The step with the routing left out.
  GroupStep Step() {
    choices_.strategy = DispatchMode::kAllGatherReduceScatterMonolithic;
    GroupStep step = *MakeStep(*group_, *moe_, *tokens_, choices_, &memory_);
    MakePlanMonolithic(logits_, step.plan);
    return step;
  }

  std::vector<std::vector<std::byte>> Run(bool on_caller) {
    const absl::StatusOr<GroupStepResult> result =
        group_->RunStep(Step(), on_caller, absl::Now() + absl::Seconds(100));
    EXPECT_TRUE(result.ok()) << result.status();
    std::vector<std::vector<std::byte>> outputs;
    if (!result.ok()) return outputs;
    const int64_t row_bytes = moe_->shape.hidden_size * DTypeBytes(choices_.output_dtype);
    for (const ShardOutput& shard : result->shards) {
      for (int64_t row = 0; row < shard.num_rows; ++row) {
        outputs.emplace_back(shard.rows + row * row_bytes, shard.rows + (row + 1) * row_bytes);
      }
    }
    return outputs;
  }

  std::unique_ptr<RandomMoe> moe_;
  std::unique_ptr<RandomTokens> tokens_;
  std::vector<float> logits_;
  StepChoices choices_;
  std::vector<std::vector<std::byte>> memory_;
  std::unique_ptr<LocalExpertGroup> group_;
};

TEST_P(MonolithicStepTest, GivesTheBytesOfTheRoutedForm) {
  for (uint64_t seed = 1; seed <= 12 && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    // Fewer experts than ranks, and no tokens, too.
    MakeModel(seed % 3 == 0 ? 2 : 11, seed == 1 ? 0 : static_cast<int64_t>(seed * 3), seed);
    choices_.strategy = DispatchMode::kAllGatherReduceScatter;
    const auto expected = RunTokens(*group_, *moe_, *tokens_, choices_);
    ASSERT_TRUE(expected.ok()) << expected.status();
    ExpectNearReference(*moe_, *tokens_, choices_, *expected);
    EXPECT_EQ(Run(/*on_caller=*/true), *expected);
    EXPECT_EQ(Run(/*on_caller=*/false), *expected);
  }
}

TEST_P(MonolithicStepTest, ABadSliceFailsTheWholeStepAndTheNextOneWorks) {
  MakeModel(11, 30, 5);
  choices_.shard_sizes.clear();
  const std::vector<std::pair<std::string, std::function<void(StepSlice&)>>> spoils = {
      {"router_logits", [](StepSlice& s) { s.router_logits.pop_back(); }},
      {"router_logits", [](StepSlice& s) { s.router_logits.clear(); }},
      {"gather_counts", [](StepSlice& s) { s.gather_counts.pop_back(); }},
      {"gather_counts", [](StepSlice& s) { ++s.gather_counts[s.ep_rank]; }},
      {"gather_counts", [](StepSlice& s) { s.gather_counts[0] = -1; }},
      {"send_rows", [](StepSlice& s) { s.send_rows = {0}; }},
      {"max_num_tokens", [](StepSlice& s) { s.max_num_tokens = 3; }},
      {"router_logits",
       [](StepSlice& s) { s.router_logits[0] = std::numeric_limits<float>::quiet_NaN(); }},
  };
  for (size_t i = 0; i < spoils.size(); ++i) {
    for (const bool on_caller : {true, false}) {
      SCOPED_TRACE("case " + std::to_string(i));
      GroupStep step = Step();
      spoils[i].second(step.plan.slices[0]);
      const absl::Status status =
          group_->RunStep(std::move(step), on_caller, absl::Now() + absl::Seconds(100)).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(spoils[i].first));
      EXPECT_EQ(Run(on_caller).size(), 30u);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MonolithicStepTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 7),
                                            ::testing::Values(CombineMode::kSum,
                                                              CombineMode::kPerExpert),
                                            ::testing::Bool(), ::testing::Bool()),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) + "ranks_" +
                                  CombineModeName(std::get<1>(test.param)) +
                                  (std::get<2>(test.param) ? "_weight_on_input" : "") +
                                  (std::get<3>(test.param) ? "_shared" : "");
                         });

}  // namespace
}  // namespace expertmesh
