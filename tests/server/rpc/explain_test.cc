#include "server/rpc/explain.h"

#include <memory>

#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"

namespace expertmesh {
namespace {

TEST(ExplainTest, ShowsNoMorePairsThanAMessageShouldHave) {
  constexpr int32_t kTopK = 100;
  constexpr int64_t kTokens = 2000;
  ModelSpec model;
  model.name = "tiny";
  model.hidden_size = 1;
  model.weight_dtype = DType::kBFloat16;
  LayerSpec& layer = model.layers.emplace_back();
  layer.num_experts = 4;
  layer.topk = kTopK;
  layer.intermediate_size = 1;
  HostBufferPool pool;
  ValidForward forward;
  forward.call = std::make_unique<ForwardCall>();
  ForwardCall& call = *forward.call;
  call.model = &model;
  call.layer = &layer;
  call.num_tokens = kTokens;
  call.topk = kTopK;
  call.activation_dtype = call.output_dtype = call.combine_dtype = DType::kBFloat16;
  call.topk_ids = *pool.Allocate(kTokens * kTopK * 4);
  call.topk_weights = *pool.Allocate(kTokens * kTopK * 4);
  for (int64_t i = 0; i < kTokens * kTopK; ++i) {
    reinterpret_cast<int32_t*>(call.topk_ids.data())[i] = static_cast<int32_t>(i % 4);
    reinterpret_cast<float*>(call.topk_weights.data())[i] = 0.5f;
  }
  const Placement placement = *Placement::Contiguous(4, 2);
  ExplainParams params;
  params.forward = &forward;
  params.placement = &placement;
  params.max_tokens = 4096;
  params.max_step_tokens = 500;
  params.max_rank_pairs = 1 << 20;
  const absl::StatusOr<v1::ExplainResponse> response = ExplainForward(params);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->num_tokens(), kTokens);
  EXPECT_EQ(response->num_steps(), 4);
  EXPECT_EQ(response->tokens_size(), 65536 / kTopK);
  EXPECT_EQ(response->tokens(0).experts_size(), kTopK);
}

}  // namespace
}  // namespace expertmesh
