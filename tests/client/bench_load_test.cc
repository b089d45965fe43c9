#include "client/cli/bench_load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <variant>
#include <vector>

namespace expertmesh {
namespace {

std::vector<int64_t> CountDraws(RoutingSkew skew, int topk, int num_tokens) {
  ExpertDrawer drawer(16, skew, /*seed=*/7);
  std::mt19937_64 random(7);
  std::vector<int64_t> counts(16);
  std::vector<int32_t> ids(static_cast<size_t>(topk));
  for (int t = 0; t < num_tokens; ++t) {
    drawer.Draw(topk, random, ids.data());
    EXPECT_EQ(std::set<int32_t>(ids.begin(), ids.end()).size(), ids.size());
    for (const int32_t id : ids) ++counts.at(static_cast<size_t>(id));
  }
  return counts;
}

TEST(BenchLoadTest, UniformDrawsEveryExpertAlike) {
  const std::vector<int64_t> counts = CountDraws(RoutingSkew::kUniform, 4, 4000);
  // 1000 expected, standard deviation below 28.
  EXPECT_GT(*std::min_element(counts.begin(), counts.end()), 850);
  EXPECT_LT(*std::max_element(counts.begin(), counts.end()), 1150);
}

TEST(BenchLoadTest, ZipfHasHotExperts) {
  std::vector<int64_t> counts = CountDraws(RoutingSkew::kZipf, 1, 10000);
  std::sort(counts.rbegin(), counts.rend());
  // H(16) = 3.38: the hottest gets 0.296, the second half of that.
  EXPECT_NEAR(static_cast<double>(counts[0]), 2958, 250);
  EXPECT_NEAR(static_cast<double>(counts[1]), 1479, 200);
}

TEST(BenchLoadTest, OneHotPutsOneExpertIntoEveryToken) {
  const std::vector<int64_t> counts = CountDraws(RoutingSkew::kOneHot, 4, 1000);
  EXPECT_EQ(counts[0], 1000);
  EXPECT_LT(*std::max_element(counts.begin() + 1, counts.end()), 350);
}

v1::GetModelResponse Model() {
  v1::GetModelResponse model;
  model.set_model("m");
  model.set_hidden_size(8);
  for (const int index : {1, 3}) {
    v1::LayerInfo* layer = model.add_layers();
    layer->set_index(index);
    layer->set_num_experts(4);
    layer->set_topk(2);
  }
  return model;
}

TEST(BenchLoadTest, LayersAreTakenInTurnAndTheSeedDecidesAll) {
  BenchLoadOptions options;
  options.num_requests = 4;
  options.tokens_per_call = 3;
  const auto first = MakeBenchLoad(Model(), options);
  const auto second = MakeBenchLoad(Model(), options);
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_EQ(first->size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ((*first)[i]->input.layer, i % 2 == 0 ? 1 : 3);
    EXPECT_EQ((*first)[i]->topk_ids, (*second)[i]->topk_ids);
    EXPECT_EQ((*first)[i]->hidden_states.data, (*second)[i]->hidden_states.data);
    EXPECT_EQ(std::get<TopKRouting>((*first)[i]->input.routing).topk, 2);
  }
  EXPECT_NE((*first)[0]->hidden_states.data, (*first)[1]->hidden_states.data);
}

TEST(BenchLoadTest, RefusesWhatTheModelDoesNotHave) {
  BenchLoadOptions options;
  options.layers = {2};
  EXPECT_EQ(MakeBenchLoad(Model(), options).status().message(),
            "layer 2 of model m has no experts");
  options.layers = {};
  options.tokens_per_call = 0;
  EXPECT_EQ(MakeBenchLoad(Model(), options).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RoutingSkewFromName("flat").status().message(),
            "--skew is 'flat'; it takes uniform, zipf or one_hot");
}

}  // namespace
}  // namespace expertmesh
