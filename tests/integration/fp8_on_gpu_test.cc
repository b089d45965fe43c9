// A checkpoint of float8 experts on an expert server with a GPU: on the emulated device.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/model/checkpoint_weight_source.h"
#include "server/model/synthetic_checkpoint.h"
#include "tests/integration/nccl_cluster.h"
#include "tests/integration/process.h"
#include "tests/integration/rank_cluster.h"
#include "tests/integration/server_under_test.h"
#include "tests/reference/reference_moe.h"
#include "tests/server/model/scratch_directory.h"

namespace expertmesh {
namespace {

constexpr int64_t kHidden = 256;
constexpr int64_t kIntermediate = 128;
constexpr int32_t kNumExperts = 6;
constexpr int kTopk = 2;
constexpr int kNumTokens = 24;
constexpr uint64_t kSeed = 20261130;

// DeepSeek-V3's layout, one MoE layer with a shared expert.
class Fp8OnGpuTest : public testing::Test {
 protected:
  Fp8OnGpuTest() {
    const auto summary =
        WriteSyntheticCheckpoint(scratch_.path(), {.architecture = "DeepseekV3ForCausalLM",
                                                   .hidden_size = kHidden,
                                                   .intermediate_size = kIntermediate,
                                                   .num_layers = 1,
                                                   .num_experts = kNumExperts,
                                                   .topk = kTopk,
                                                   .dtype = DType::kFloat8E4M3,
                                                   .seed = kSeed});
    EXPECT_TRUE(summary.ok()) << summary.status();
  }

  std::unique_ptr<RankCluster> Start(const std::vector<std::string>& fp8_args) {
    RankCluster::Options options;
    options.checkpoint = scratch_.path();
    options.ep_size = 1;
    options.expert_server = "expertmesh-expert-server-emulated-gpu";
    options.rank_args = {"--device=cuda:0"};
    options.rank_args.insert(options.rank_args.end(), fp8_args.begin(), fp8_args.end());
    options.control_args = {"--allow_admin"};
    return RankCluster::Start(options);
  }

  static v1::ForwardRequest RandomRequest() {
    std::mt19937_64 random(kSeed);
    v1::ForwardRequest request;
    v1::Tensor* hidden = request.mutable_hidden_states();
    hidden->set_dtype(v1::DATA_TYPE_FLOAT32);
    hidden->add_shape(kNumTokens);
    hidden->add_shape(kHidden);
    std::normal_distribution<float> normal;
    std::vector<float> values(kNumTokens * kHidden);
    for (float& value : values) value = normal(random);
    hidden->set_data(values.data(), values.size() * sizeof(float));
    request.mutable_topk()->set_topk(kTopk);
    for (int token = 0; token < kNumTokens; ++token) {
      const int first = static_cast<int>(random() % kNumExperts);
      request.mutable_topk()->add_ids(first);
      request.mutable_topk()->add_ids((first + 1) % kNumExperts);
      request.mutable_topk()->add_weights(0.75f);
      request.mutable_topk()->add_weights(0.25f);
    }
    return request;
  }

  // Of the checkpoint's own values, element times scale.
  std::vector<double> Reference(const v1::ForwardRequest& request) const {
    const auto source =
        CheckpointWeightSource::Open(scratch_.path(), {.fp8_weights = Fp8Weights::kNative});
    EXPECT_TRUE(source.ok()) << source.status();
    ReferenceExperts experts;
    experts.num_experts = kNumExperts;
    experts.hidden_size = kHidden;
    experts.intermediate_size = kIntermediate;
    const auto append = [](const WeightMatrix& matrix, const float* scales, int64_t rows,
                           int64_t cols, std::vector<double>* out) {
      const auto* elements = static_cast<const std::byte*>(matrix.data);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; ++col) {
          const float element =
              Float8E4M3ToFloat(static_cast<uint8_t>(elements[row * matrix.row_stride + col]));
          out->push_back(static_cast<double>(element) *
                         static_cast<double>(scales[row / 128 * (cols / 128) + col / 128]));
        }
      }
    };
    for (int32_t expert = 0; expert < kNumExperts; ++expert) {
      const auto loaded = (*source)->LoadExpert(0, expert);
      EXPECT_TRUE(loaded.ok()) << loaded.status();
      const ExpertWeights& weights = loaded->weights;
      append(weights.gate, weights.gate_scales, kIntermediate, kHidden, &experts.w13);
      append(weights.up, weights.up_scales, kIntermediate, kHidden, &experts.w13);
      append(weights.down, weights.down_scales, kHidden, kIntermediate, &experts.w2);
    }
    std::vector<float> hidden(kNumTokens * kHidden);
    std::memcpy(hidden.data(), request.hidden_states().data().data(),
                hidden.size() * sizeof(float));
    return ReferenceForward(experts, {hidden.begin(), hidden.end()},
                            {request.topk().ids().begin(), request.topk().ids().end()},
                            {request.topk().weights().begin(), request.topk().weights().end()},
                            kTopk);
  }

  // The root mean square of the answer's errors, relative to that of the reference.
  double RelativeError(RankCluster& cluster, v1::DataType* weight_dtype) {
    const v1::ForwardRequest request = RandomRequest();
    const CallOutcome outcome = cluster.control().Forward(request);
    EXPECT_TRUE(outcome.ok()) << outcome;
    *weight_dtype = outcome.response.served_by().weight_dtype();
    const std::vector<double> expected = Reference(request);
    const std::vector<double> output = OutputValues(outcome.response.output());
    EXPECT_EQ(output.size(), expected.size());
    double errors = 0;
    double values = 0;
    for (size_t i = 0; i < output.size(); ++i) {
      errors += (output[i] - expected[i]) * (output[i] - expected[i]);
      values += expected[i] * expected[i];
    }
    return std::sqrt(errors / values);
  }

  static int64_t WeightBytes(RankCluster& cluster) {
    const auto status = cluster.control().GetStatus();
    EXPECT_TRUE(status.ok()) << status.status();
    return status.ok() && status->ranks_size() == 1 ? status->ranks(0).weight_bytes() : 0;
  }

  // Of the routed and the one shared expert.
  static constexpr int64_t kNumWeights = (kNumExperts + 1) * 3 * kHidden * kIntermediate;
  ScratchDirectory scratch_;
};

// A GPU's default. An element of e4m3 errs by up to 2^-4 of itself, by 2^-5.3 in the root mean
// square where elements are spread over an octave; gates, ups and intermediate rows each bring
// that, independently: sqrt(3) of it, 4.4%. Rows that were not quantized would err by far less.
TEST_F(Fp8OnGpuTest, StaysFp8AndRowsAreQuantized) {
  const std::unique_ptr<RankCluster> cluster = Start({});
  ASSERT_NE(cluster, nullptr);
  v1::DataType weight_dtype = v1::DATA_TYPE_UNSPECIFIED;
  const double error = RelativeError(*cluster, &weight_dtype);
  EXPECT_LT(error, 0.08);
  EXPECT_GT(error, 0.01);
  EXPECT_EQ(weight_dtype, v1::DATA_TYPE_FLOAT8_E4M3);
  const auto model = cluster->control().GetModel("");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->weight_dtype(), v1::DATA_TYPE_FLOAT8_E4M3);
  EXPECT_EQ(model->activation_dtype(), v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(WeightBytes(*cluster), kNumWeights + kNumWeights / (128 * 128) * 4);
}

// The weights are rounded to bfloat16, and float32 rows are not.
TEST_F(Fp8OnGpuTest, BecomesBFloat16WhereAsked) {
  const std::unique_ptr<RankCluster> cluster = Start({"--fp8_weights=dequantize"});
  ASSERT_NE(cluster, nullptr);
  v1::DataType weight_dtype = v1::DATA_TYPE_UNSPECIFIED;
  EXPECT_LT(RelativeError(*cluster, &weight_dtype), 0.005);
  EXPECT_EQ(weight_dtype, v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(WeightBytes(*cluster), 2 * kNumWeights);
}

// Two ranks hold them as float8; one that would come back with bfloat16 is not taken.
TEST_F(Fp8OnGpuTest, AGroupHoldsThemAsOneType) {
  const RankCluster::Options options = NcclCluster(2, scratch_.path());
  const std::unique_ptr<RankCluster> cluster = RankCluster::Start(options);
  ASSERT_NE(cluster, nullptr);
  v1::DataType weight_dtype = v1::DATA_TYPE_UNSPECIFIED;
  EXPECT_LT(RelativeError(*cluster, &weight_dtype), 0.08);
  EXPECT_EQ(weight_dtype, v1::DATA_TYPE_FLOAT8_E4M3);
  ASSERT_TRUE(cluster->rank(1).Kill().ok());
  ASSERT_TRUE(cluster->rank(1).Wait(absl::Seconds(60)).ok());
  ASSERT_TRUE(cluster->control().process().WaitForLine("an epoch ended", absl::Seconds(60)).ok());
  std::vector<std::string> args = options.rank_args;
  args.insert(args.end(), {"--checkpoint=" + scratch_.path(), "--ep_rank=1", "--ep_size=2",
                           "--fp8_weights=dequantize"});
  const std::unique_ptr<ServerProcess> other = cluster->StartExpertServer(args);
  ASSERT_NE(other, nullptr);
  const absl::StatusOr<int> exit_code = other->Wait(absl::Seconds(60));
  ASSERT_TRUE(exit_code.ok()) << exit_code.status();
  EXPECT_EQ(*exit_code, 1);
  EXPECT_THAT(other->Stderr(),
              testing::AllOf(testing::HasSubstr("as bfloat16, rank 0 as float8_e4m3"),
                             testing::HasSubstr("the same --fp8_weights")));
}

TEST(Fp8OfOneProcessTest, NativeIsRefusedWhereTheCheckpointCannot) {
  const FinishedProcess finished =
      RunToEnd({.path = SiblingBinary("expertmesh-control-plane-emulated-gpu"),
                .args = {"--checkpoint=tests/golden/deepseek_v3_fp8", "--listen=127.0.0.1:0",
                         "--metrics_listen=", "--device=cuda:0", "--fp8_weights=native"}});
  EXPECT_EQ(finished.exit_code, 1);
  EXPECT_THAT(finished.err,
              testing::AllOf(testing::HasSubstr("its experts cannot stay float8_e4m3, for "
                                                "hidden_size is 136, not a multiple of 128"),
                             testing::HasSubstr("--fp8_weights=auto")));
}

}  // namespace
}  // namespace expertmesh
