#include "server/model/model_config.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/model/scratch_directory.h"

namespace expertmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using Json = nlohmann::json;

Json Mixtral() {
  return {{"architectures", {"MixtralForCausalLM"}},
          {"hidden_size", 64},
          {"intermediate_size", 32},
          {"num_hidden_layers", 3},
          {"num_local_experts", 8},
          {"num_experts_per_tok", 2}};
}

Json Qwen3() {
  return {{"architectures", {"Qwen3MoeForCausalLM"}},
          {"hidden_size", 64},
          {"moe_intermediate_size", 32},
          {"num_hidden_layers", 6},
          {"num_experts", 8},
          {"num_experts_per_tok", 2}};
}

Json DeepSeekV3() {
  return {{"architectures", {"DeepseekV3ForCausalLM"}},
          {"hidden_size", 64},
          {"moe_intermediate_size", 32},
          {"num_hidden_layers", 5},
          {"n_routed_experts", 16},
          {"num_experts_per_tok", 4},
          {"n_shared_experts", 2},
          {"first_k_dense_replace", 3},
          {"moe_layer_freq", 1},
          {"n_group", 4},
          {"topk_group", 2},
          {"norm_topk_prob", true},
          {"routed_scaling_factor", 2.5}};
}

Json With(Json json, const Json& changes) {
  json.update(changes);
  return json;
}

absl::StatusOr<ModelConfig> Parse(const Json& json, absl::string_view architecture = "") {
  return ParseModelConfig(json.dump(), architecture);
}

std::string ErrorOf(const Json& json, absl::string_view architecture = "") {
  return std::string(Parse(json, architecture).status().message());
}

std::vector<int32_t> LayersOf(const Json& json) {
  const auto config = Parse(json);
  EXPECT_TRUE(config.ok()) << config.status();
  std::vector<int32_t> layers;
  for (const LayerSpec& layer : config->spec.layers) layers.push_back(layer.index);
  return layers;
}

TEST(ModelConfigTest, Mixtral) {
  const auto config = Parse(With(Mixtral(), {{"torch_dtype", "bfloat16"}}));
  ASSERT_TRUE(config.ok()) << config.status();
  const ModelSpec& spec = config->spec;
  EXPECT_EQ(spec.architecture, "MixtralForCausalLM");
  EXPECT_EQ(spec.hidden_size, 64);
  EXPECT_EQ(spec.weight_dtype, DType::kBFloat16);
  EXPECT_EQ(spec.activation, Activation::kSiluMul);
  ASSERT_EQ(spec.layers.size(), 3u);
  EXPECT_EQ(spec.layers[1].num_experts, 8);
  EXPECT_EQ(spec.layers[1].topk, 2);
  EXPECT_EQ(spec.layers[1].intermediate_size, 32);
  EXPECT_TRUE(spec.layers[1].router.renormalize);
  EXPECT_FALSE(config->fp8_blocks);
}

TEST(ModelConfigTest, DeepSeekV3) {
  const auto config =
      Parse(With(DeepSeekV3(),
                 {{"quantization_config",
                   {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {128, 64}}}}}));
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_EQ(config->spec.layers.size(), 2u);
  const LayerSpec& layer = config->spec.layers[0];
  EXPECT_EQ(layer.index, 3);
  EXPECT_EQ(layer.shared_intermediate_size, 64);
  EXPECT_FALSE(layer.shared_gated);
  EXPECT_EQ(layer.router.scores, RouterSpec::Scores::kSigmoid);
  EXPECT_EQ(layer.router.group_score, RouterSpec::GroupScore::kSumOfTopTwo);
  EXPECT_EQ(layer.router.num_groups, 4);
  EXPECT_EQ(layer.router.topk_groups, 2);
  EXPECT_TRUE(layer.router.has_correction_bias);
  EXPECT_FLOAT_EQ(layer.router.routed_scaling_factor, 2.5f);
  EXPECT_TRUE(config->fp8_blocks);
  EXPECT_EQ(config->fp8_block_rows, 128);
  EXPECT_EQ(config->fp8_block_cols, 64);
}

TEST(ModelConfigTest, DeepSeekV2ScalesOrRenormalizes) {
  Json json = With(DeepSeekV3(), {{"architectures", {"DeepseekV2ForCausalLM"}},
                                  {"topk_method", "greedy"},
                                  {"norm_topk_prob", false}});
  auto config = Parse(json);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->spec.layers[0].router.num_groups, 1);
  EXPECT_FALSE(config->spec.layers[0].router.renormalize);
  EXPECT_FLOAT_EQ(config->spec.layers[0].router.routed_scaling_factor, 2.5f);
  config = Parse(With(json, {{"topk_method", "group_limited_greedy"}, {"norm_topk_prob", true}}));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->spec.layers[0].router.num_groups, 4);
  EXPECT_TRUE(config->spec.layers[0].router.renormalize);
  EXPECT_FLOAT_EQ(config->spec.layers[0].router.routed_scaling_factor, 1.0f);
  EXPECT_THAT(ErrorOf(With(json, {{"topk_method", "noaux_tc"}})),
              HasSubstr("key 'topk_method' is \"noaux_tc\"; expected 'greedy' or"));
}

TEST(ModelConfigTest, WhichLayersAreMoe) {
  EXPECT_THAT(LayersOf(Qwen3()), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(LayersOf(With(Qwen3(), {{"decoder_sparse_step", 2}})), ElementsAre(1, 3, 5));
  EXPECT_THAT(LayersOf(With(Qwen3(), {{"mlp_only_layers", {4, 0, 9}}})), ElementsAre(1, 2, 3, 5));
  EXPECT_THAT(LayersOf(With(Qwen3(), {{"mlp_only_layers", nullptr}})),
              ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(LayersOf(With(DeepSeekV3(), {{"first_k_dense_replace", 1}, {"moe_layer_freq", 2}})),
              ElementsAre(2, 4));
  Json ernie = With(Mixtral(), {{"architectures", {"Ernie4_5_MoeForCausalLM"}},
                                {"moe_intermediate_size", 32},
                                {"num_hidden_layers", 8},
                                {"moe_num_experts", 8},
                                {"moe_k", 2},
                                {"moe_num_shared_experts", 2},
                                {"moe_layer_start_index", 1},
                                {"moe_layer_end_index", -1},
                                {"moe_layer_interval", 2}});
  EXPECT_THAT(LayersOf(ernie), ElementsAre(1, 3, 5, 7));
  EXPECT_THAT(LayersOf(With(ernie, {{"moe_layer_end_index", 5}})), ElementsAre(1, 3, 5));
  Json llama = With(Mixtral(), {{"architectures", {"Llama4ForCausalLM"}},
                                {"num_hidden_layers", 6},
                                {"interleave_moe_layer_step", 2}});
  EXPECT_THAT(LayersOf(llama), ElementsAre(1, 3, 5));
  EXPECT_THAT(LayersOf(With(llama, {{"moe_layers", {0, 4}}})), ElementsAre(0, 4));
  EXPECT_THAT(ErrorOf(With(Qwen3(), {{"decoder_sparse_step", 7}})),
              HasSubstr("none of the 6 layers is an MoE layer"));
}

TEST(ModelConfigTest, HunyuanGivesValuesPerLayer) {
  const Json json = With(Mixtral(), {{"architectures", {"HunYuanMoEV1ForCausalLM"}},
                                     {"num_experts", {4, 5, 6}},
                                     {"moe_topk", {1, 2, 3}},
                                     {"moe_intermediate_size", {16, 24, 32}},
                                     {"num_shared_expert", {1, 2, 1}}});
  const auto config = Parse(json);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->spec.layers[1].num_experts, 5);
  EXPECT_EQ(config->spec.layers[1].topk, 2);
  EXPECT_EQ(config->spec.layers[1].intermediate_size, 24);
  EXPECT_EQ(config->spec.layers[1].shared_intermediate_size, 48);
  EXPECT_THAT(ErrorOf(With(json, {{"moe_topk", {1, 2}}})),
              HasSubstr("key 'moe_topk' is [1,2]; expected an integer, or a list of 3"));
  EXPECT_THAT(ErrorOf(With(json, {{"moe_topk", {1, 6, 1}}})),
              HasSubstr("expected in element 1 an integer from 1 to 5"));
}

TEST(ModelConfigTest, SectionsOfMultimodalModels) {
  Json text = Mixtral();
  text.erase("architectures");
  const Json json = {{"architectures", {"Llama4ForConditionalGeneration"}}, {"text_config", text}};
  const auto config = Parse(json);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->spec.hidden_size, 64);
  EXPECT_TRUE(config->spec.apply_router_weight_on_input);
  EXPECT_THAT(ErrorOf({{"architectures", {"Llama4ForConditionalGeneration"}}}),
              HasSubstr("key 'text_config' is missing; expected an object"));
  text["hidden_size"] = 0;
  EXPECT_THAT(
      ErrorOf({{"architectures", {"Llama4ForConditionalGeneration"}}, {"text_config", text}}),
      HasSubstr("key 'text_config.hidden_size' is 0"));
}

TEST(ModelConfigTest, UnknownArchitecturesListTheKnownOnesAndTheFlag) {
  EXPECT_THAT(
      ErrorOf(With(Mixtral(), {{"architectures", {"FooForCausalLM"}}})),
      AllOf(HasSubstr("architecture 'FooForCausalLM' is unknown"), HasSubstr("MixtralForCausalLM"),
            HasSubstr("GptOssForCausalLM"), HasSubstr("--architecture=")));
  Json json = Mixtral();
  json.erase("architectures");
  json["model_type"] = "mixtral";
  EXPECT_TRUE(Parse(json).ok());
  json["model_type"] = "foo";
  EXPECT_THAT(ErrorOf(json), HasSubstr("model_type 'foo' is unknown"));
}

TEST(ModelConfigTest, MapsAnArchitectureByHand) {
  const Json json = {{"architectures", {"FooForCausalLM"}},
                     {"hidden_size", 64},
                     {"expert_size", 32},
                     {"depth", 2},
                     {"n_experts", 8},
                     {"num_experts_per_tok", 2}};
  const auto config = Parse(json,
                            "Qwen3MoeForCausalLM,keys.num_experts=n_experts,"
                            "keys.intermediate_size=expert_size,keys.num_layers=depth,"
                            "layer_prefix=h.{layer}.,tensors.router=moe.gate.weight");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->spec.layers.size(), 2u);
  EXPECT_EQ(config->spec.layers[0].num_experts, 8);
  EXPECT_EQ(config->architecture.layer_prefix, "h.{layer}.");
  EXPECT_EQ(config->architecture.tensors.router, "moe.gate.weight");
  EXPECT_THAT(ErrorOf(json, "Foo"),
              HasSubstr("--architecture begins with 'Foo'; expected one of MixtralForCausalLM"));
  EXPECT_THAT(ErrorOf(json, "MixtralForCausalLM,colour=red"),
              AllOf(HasSubstr("--architecture has 'colour=red'"),
                    HasSubstr("one of name, config_section, layer_prefix, keys.num_layers"),
                    HasSubstr("and 29 more")));
  EXPECT_THAT(ErrorOf(json, "MixtralForCausalLM,tensors.ruoter=x"),
              HasSubstr("expected member=value, the member tensors.router ("));
  EXPECT_THAT(ErrorOf(json, "MixtralForCausalLM,tensors.down"), HasSubstr("expected member=value"));
}

TEST(ModelConfigTest, EveryBadValueNamesKeyValueAndLimit) {
  struct Case {
    Json json;
    std::string message;
  };
  const std::vector<Case> cases = {
      {With(Mixtral(), {{"hidden_size", nullptr}}),
       "key 'hidden_size' is missing; expected an integer from 1 to 1048576"},
      {With(Mixtral(), {{"hidden_size", -5}}), "key 'hidden_size' is -5; expected an integer"},
      {With(Mixtral(), {{"hidden_size", 1048577}}), "1048577; expected an integer from 1 to"},
      {With(Mixtral(), {{"hidden_size", 64.5}}), "key 'hidden_size' is 64.5"},
      {With(Mixtral(), {{"hidden_size", "64"}}), "key 'hidden_size' is \"64\""},
      {With(Mixtral(), {{"hidden_size", UINT64_MAX}}),
       "'hidden_size' is 18446744073709551615; expected"},
      {With(Mixtral(), {{"hidden_size", {64}}}), "key 'hidden_size' is [64]"},
      {With(Mixtral(), {{"intermediate_size", 0}}), "key 'intermediate_size' is 0"},
      {With(Mixtral(), {{"num_hidden_layers", 0}}), "key 'num_hidden_layers' is 0"},
      {With(Mixtral(), {{"num_hidden_layers", 1e9}}), "key 'num_hidden_layers' is 1000000000.0"},
      {With(Mixtral(), {{"num_hidden_layers", 5000}}), "expected an integer from 1 to 4096"},
      {With(Mixtral(), {{"num_local_experts", 0}}), "key 'num_local_experts' is 0"},
      {With(Mixtral(), {{"num_local_experts", 65537}}), "expected an integer from 1 to 65536"},
      {With(Mixtral(), {{"num_experts_per_tok", 9}}),
       "key 'num_experts_per_tok' is 9; expected an integer from 1 to 8"},
      {With(Mixtral(), {{"num_experts_per_tok", 0}}), "key 'num_experts_per_tok' is 0"},
      {With(Mixtral(), {{"hidden_act", "relu"}}),
       "key 'hidden_act' is \"relu\"; expected \"silu\" or \"gelu\""},
      {With(Mixtral(), {{"hidden_act", 3}}), "key 'hidden_act' is 3; expected a string"},
      {With(Mixtral(), {{"architectures", "MixtralForCausalLM"}}),
       "key 'architectures' is \"MixtralForCausalLM\"; expected a list"},
      {With(Mixtral(), {{"architectures", Json::array()}}), "expected a list that begins"},
      {With(Mixtral(), {{"quantization_config", {{"quant_method", "mxfp4"}}}}),
       "key 'quantization_config.quant_method' is \"mxfp4\"; expected \"fp8\""},
      {With(Mixtral(), {{"quantization_config", {{"quant_method", "fp8"}}}}),
       "key 'quantization_config.weight_block_size' is missing"},
      {With(Mixtral(),
            {{"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {128, 0}}}}}),
       "expected in element 1 an integer from 1"},
      {With(Mixtral(), {{"quantization_config", {{"quant_method", "fp8"}, {"fmt", "e5m2"}}}}),
       "key 'quantization_config.fmt' is \"e5m2\"; expected \"e4m3\""},
      {With(Mixtral(), {{"quantization_config", 1}}), "'quantization_config' is 1; expected an"},
      {With(Qwen3(), {{"norm_topk_prob", 1}}), "'norm_topk_prob' is 1; expected true or false"},
      {With(Qwen3(), {{"decoder_sparse_step", 0}}), "key 'decoder_sparse_step' is 0"},
      {With(Qwen3(), {{"mlp_only_layers", 3}}), "'mlp_only_layers' is 3; expected a list"},
      {With(Qwen3(), {{"mlp_only_layers", {1, -1}}}), "expected in element 1 an integer from 0"},
      {With(DeepSeekV3(), {{"first_k_dense_replace", 6}}), "expected an integer from 0 to 5"},
      {With(DeepSeekV3(), {{"n_shared_experts", 65000}}), "at most 32768 experts of size 32"},
      {With(DeepSeekV3(), {{"n_group", 3}}),
       "layer 3: num_groups is 3; expected a divisor of num_experts, 16"},
      {With(DeepSeekV3(), {{"topk_group", 5}}), "'topk_group' is 5; expected an integer from 1 to"},
      {With(DeepSeekV3(), {{"num_experts_per_tok", 9}}),
       "topk is 9; expected at most the 8 experts of topk_groups groups"},
      {With(DeepSeekV3(), {{"routed_scaling_factor", "1"}}),
       "key 'routed_scaling_factor' is \"1\"; expected a number"},
      {With(DeepSeekV3(), {{"routed_scaling_factor", 1e300}}), "expected a number from"},
      {With(DeepSeekV3(), {{"mlp_bias", true}}), "key 'mlp_bias' is true; expected false"},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.message);
    const auto config = Parse(bad.json);
    EXPECT_FALSE(config.ok());
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(bad.message));
    EXPECT_LT(config.status().message().size(), 2000u);
  }
}

TEST(ModelConfigTest, BrokenJsonIsRefused) {
  const auto error = [](absl::string_view text) {
    return std::string(ParseModelConfig(text).status().message());
  };
  EXPECT_THAT(error(""), HasSubstr("is no valid JSON"));
  EXPECT_THAT(error("[]"), HasSubstr("is no JSON object"));
  EXPECT_THAT(error("\"x\""), HasSubstr("is no JSON object"));
  EXPECT_THAT(error(R"({"hidden_size":1,"hidden_size":2})"), HasSubstr("key 'hidden_size' occurs"));
  EXPECT_THAT(error(R"({"a":{"b":[{"c":1,"c":2}]}})"), HasSubstr("key 'c' occurs twice"));
  EXPECT_THAT(error(std::string("{}\0", 3)), HasSubstr("zero byte at 2"));
  EXPECT_THAT(error("{\"a\":" + std::string(1000000, '[')), HasSubstr("nested more than 64 deep"));
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
  EXPECT_THAT(error(objects), HasSubstr("nested more than 64 deep"));
  EXPECT_THAT(error("{\"a\":NaN}"), HasSubstr("is no valid JSON"));
}

TEST(ModelConfigTest, ErrorsNameTheFile) {
  ScratchDirectory scratch;
  EXPECT_EQ(LoadModelConfig(scratch.path()).status().code(), absl::StatusCode::kNotFound);
  scratch.Write("config.json", "{}");
  EXPECT_THAT(std::string(LoadModelConfig(scratch.path()).status().message()),
              StartsWith("file '" + scratch.File("config.json") + "': "));
  scratch.Write("config.json", Mixtral().dump());
  EXPECT_TRUE(LoadModelConfig(scratch.path()).ok());
}

}  // namespace
}  // namespace expertmesh
