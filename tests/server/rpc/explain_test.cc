#include "server/rpc/explain.h"

#include <memory>

#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/ops/call_error.h"

namespace expertmesh {
namespace {

// `tokens` tokens of top-k `topk` over four experts on two ranks; ids count 0, 1, 2, 3, 0, ...
class ExplainTest : public testing::Test {
 protected:
  void Fill(int64_t tokens, int32_t topk) {
    model_.name = "tiny";
    model_.hidden_size = 1;
    model_.weight_dtype = DType::kBFloat16;
    LayerSpec& layer = model_.layers.emplace_back();
    layer.num_experts = 4;
    layer.topk = topk;
    layer.intermediate_size = 1;
    forward_.call = std::make_unique<ForwardCall>();
    ForwardCall& call = *forward_.call;
    call.model = &model_;
    call.layer = &layer;
    call.num_tokens = tokens;
    call.topk = topk;
    call.activation_dtype = call.output_dtype = call.combine_dtype = DType::kBFloat16;
    call.topk_ids = *pool_.Allocate(tokens * topk * 4);
    call.topk_weights = *pool_.Allocate(tokens * topk * 4);
    for (int64_t i = 0; i < tokens * topk; ++i) {
      reinterpret_cast<int32_t*>(call.topk_ids.data())[i] = static_cast<int32_t>(i % 4);
      reinterpret_cast<float*>(call.topk_weights.data())[i] = 0.5f;
    }
    params_.forward = &forward_;
    params_.placement = &placement_;
    params_.max_tokens = 4096;
    params_.max_step_tokens = 500;
    params_.max_rank_pairs = 1 << 20;
  }

  HostBufferPool pool_;
  ModelSpec model_;
  ValidForward forward_;
  const Placement placement_ = *Placement::Contiguous(4, 2);
  ExplainParams params_;
};

TEST_F(ExplainTest, ShowsNoMorePairsThanAMessageShouldHave) {
  constexpr int32_t kTopK = 100;
  constexpr int64_t kTokens = 2000;
  Fill(kTokens, kTopK);
  const absl::StatusOr<v1::ExplainResponse> response = ExplainForward(params_);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->num_tokens(), kTokens);
  EXPECT_EQ(response->num_steps(), 4);
  EXPECT_EQ(response->tokens_size(), 65536 / kTopK);
  EXPECT_EQ(response->tokens(0).experts_size(), kTopK);
}

// Four experts on two ranks: every token needs both. Six tokens in slots of three, four of two.
TEST_F(ExplainTest, FixedCapacityCountsEverySlotOfEveryStep) {
  Fill(10, 4);
  forward_.call->dispatch = DispatchMode::kAllToAllFixedCapacity;
  params_.max_num_tokens = 3;
  const absl::StatusOr<v1::ExplainResponse> response = ExplainForward(params_);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->strategy(), v1::DISPATCH_MODE_ALL_TO_ALL_FIXED_CAPACITY);
  EXPECT_EQ(response->num_steps(), 2);
  const int64_t row_bytes = model_.hidden_size * 2;
  EXPECT_EQ(response->dispatch_bytes(), 2 * (3 + 2) * row_bytes);
  EXPECT_EQ(response->combine_bytes(), 2 * (3 + 2) * row_bytes);
}

TEST_F(ExplainTest, AnExpertThatOccursTwiceIsOneRowUnlessWeightsGoOnTheInput) {
  Fill(1, 6);  // experts 0, 1, 2, 3, 0, 1
  absl::StatusOr<v1::ExplainResponse> response = ExplainForward(params_);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->ranks(0).num_expert_rows(), 2);
  EXPECT_EQ(response->ranks(1).num_expert_rows(), 2);
  forward_.call->apply_router_weight_on_input = true;
  response = ExplainForward(params_);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->ranks(0).num_expert_rows(), 4);
  EXPECT_EQ(response->ranks(1).num_expert_rows(), 2);
}

TEST_F(ExplainTest, WithoutARouterIsAnError) {
  Fill(2, 2);
  forward_.call->routing = RoutingKind::kServerGate;
  EXPECT_EQ(GetCallErrorDetails(ExplainForward(params_).status())->reason,
            ErrorReason::kNoGateWeights);
}

}  // namespace
}  // namespace expertmesh
