#include "server/rpc/forward_validation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>

#include "grpcpp/support/byte_buffer.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/ops/call_error.h"
#include "server/rpc/forward_decoder.h"
#include "tests/integration/bad_requests.h"

namespace expertmesh {
namespace {

const RequestTarget& Target() {
  static const RequestTarget* const target = new RequestTarget{"tiny", 1, 0, 6, 5};
  return *target;
}

ModelSpec TinyModel() {
  ModelSpec model;
  model.name = "tiny";
  model.hidden_size = 6;
  model.weight_dtype = DType::kBFloat16;
  model.fingerprint = "abcd";
  LayerSpec layer;
  layer.index = 1;
  layer.num_experts = 5;
  layer.topk = 2;
  layer.intermediate_size = 4;
  model.layers = {layer};
  return model;
}

class ForwardValidationTest : public testing::Test {
 protected:
  ForwardValidationTest() : model_(TinyModel()), validator_(MakeValidator(&model_)) {}

  ForwardValidator MakeValidator(const ModelSpec* model,
                                 DispatchMode dispatch = DispatchMode::kAuto) {
    ForwardLimits limits;
    limits.dispatch = dispatch;
    limits.activation_dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
    limits.strategies = {DispatchMode::kAllToAll};
    return ForwardValidator({model}, limits, &pool_);
  }

  absl::StatusOr<ValidForward> Validate(const v1::ForwardRequest& request) {
    const std::string bytes = request.SerializeAsString();
    grpc::Slice slice(bytes.data(), bytes.size());
    grpc::ByteBuffer message(&slice, 1);
    auto decoded = DecodeForwardRequest(&message, ForwardDecodeLimits(),
                                        [this](int64_t size) { return pool_.Allocate(size); });
    if (!decoded.ok()) return decoded.status();
    return validator_.Validate(std::move(*decoded));
  }

  HostBufferPool pool_;
  ModelSpec model_;
  ForwardValidator validator_;
};

TEST_F(ForwardValidationTest, RefusesEachBadRequestWithFieldValueAndLimit) {
  for (const BadRequest& bad : BadRequests(Target())) {
    SCOPED_TRACE(bad.name);
    v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
    bad.spoil(&request);
    const auto valid = Validate(request);
    EXPECT_EQ(valid.status().code(), bad.code) << valid.status();
    const auto details = GetCallErrorDetails(valid.status());
    ASSERT_TRUE(details.has_value());
    EXPECT_EQ(std::string(ErrorReasonName(details->reason)), bad.reason);
    EXPECT_EQ(details->field, bad.field);
    if (!bad.value.empty()) {
      EXPECT_EQ(details->value, bad.value);
    }
    if (!bad.limit.empty()) {
      EXPECT_EQ(details->limit, bad.limit);
    }
  }
}

TEST_F(ForwardValidationTest, TakesWhatOnlyLooksBad) {
  for (const OddRequest& odd : OddButGoodRequests(Target())) {
    SCOPED_TRACE(odd.name);
    v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
    odd.change(&request);
    EXPECT_TRUE(Validate(request).ok()) << Validate(request).status();
  }
}

TEST_F(ForwardValidationTest, HandsOverPayloadAndDefaults) {
  const v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  auto valid = Validate(request);
  ASSERT_TRUE(valid.ok()) << valid.status();
  const ForwardCall& call = *valid->call;
  EXPECT_EQ(call.model, &model_);
  EXPECT_EQ(call.layer, &model_.layers[0]);
  EXPECT_EQ(call.num_tokens, 4);
  EXPECT_EQ(call.topk, 2);
  EXPECT_EQ(call.activation_dtype, DType::kBFloat16);
  EXPECT_EQ(call.output_dtype, DType::kBFloat16);
  EXPECT_EQ(call.combine_dtype, DType::kBFloat16);
  EXPECT_EQ(call.combine, CombineMode::kSum);
  EXPECT_EQ(call.routing, RoutingKind::kTopK);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(call.hidden_states.data()),
                        static_cast<size_t>(call.hidden_states.size_bytes())),
            request.hidden_states().data());
  EXPECT_EQ(valid->num_pairs, 8);
  EXPECT_FALSE(valid->output_as_values);
}

TEST_F(ForwardValidationTest, CombineDTypeFollowsOutputDType) {
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  request.mutable_options()->set_output_dtype(v1::DATA_TYPE_FLOAT32);
  auto valid = Validate(request);
  ASSERT_TRUE(valid.ok()) << valid.status();
  EXPECT_EQ(valid->call->combine_dtype, DType::kFloat32);
}

TEST_F(ForwardValidationTest, ValuesBecomeTheModelsTypeAndComeBackAsValues) {
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  v1::Tensor* hidden = request.mutable_hidden_states();
  hidden->clear_data();
  hidden->clear_dtype();
  for (int i = 0; i < 24; ++i) hidden->add_values(static_cast<float>(i) + 0.001f);
  auto valid = Validate(request);
  ASSERT_TRUE(valid.ok()) << valid.status();
  EXPECT_EQ(valid->call->activation_dtype, DType::kBFloat16);
  EXPECT_EQ(LoadFloat(valid->call->hidden_states.data(), DType::kBFloat16, 23), 23.0f);
  EXPECT_TRUE(valid->output_as_values);
  request.mutable_options()->set_output_format(v1::OUTPUT_FORMAT_DATA);
  EXPECT_FALSE(Validate(request)->output_as_values);
}

TEST_F(ForwardValidationTest, ServerGateNeedsGateWeights) {
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  request.mutable_server_gate();
  const auto refused = Validate(request);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(GetCallErrorDetails(refused.status())->reason, ErrorReason::kNoGateWeights);
  model_.layers[0].has_gate = true;
  auto valid = Validate(request);
  ASSERT_TRUE(valid.ok()) << valid.status();
  EXPECT_EQ(valid->call->routing, RoutingKind::kServerGate);
  EXPECT_EQ(valid->call->topk, 2);
}

// Zero times an infinite weight would be NaN.
TEST_F(ForwardValidationTest, WeightsOnInputMustBeFiniteInItsType) {
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  request.mutable_topk()->set_weights(3, 70000.0f);
  request.mutable_hidden_states()->set_dtype(v1::DATA_TYPE_FLOAT16);
  EXPECT_TRUE(Validate(request).ok());
  request.set_apply_router_weight_on_input(true);
  const auto refused = Validate(request);
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetCallErrorDetails(refused.status())->field, "topk.weights[3]");
  request.mutable_topk()->set_weights(3, 65519.0f);  // the largest that rounds to 65504
  EXPECT_TRUE(Validate(request).ok()) << Validate(request).status();
  request.mutable_topk()->set_weights(3, 70000.0f);
  request.mutable_topk()->set_ids(3, -1);
  EXPECT_TRUE(Validate(request).ok()) << "not read beside -1";
}

// The model's own habit applies where the model routes, the request's word everywhere.
TEST_F(ForwardValidationTest, WeightOnInputByRequestOrByTheModelsHabit) {
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  model_.apply_router_weight_on_input = true;
  model_.layers[0].has_gate = true;
  EXPECT_FALSE(Validate(request)->call->apply_router_weight_on_input);
  request.mutable_server_gate();
  EXPECT_TRUE(Validate(request)->call->apply_router_weight_on_input);
}

// With shared experts the rows of tokens without an expert are read too, so they must be finite.
TEST_F(ForwardValidationTest, SharedExpertsReadEveryRow) {
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  for (const int k : {0, 1}) request.mutable_topk()->set_ids(2 * 2 + k, -1);
  std::string* data = request.mutable_hidden_states()->mutable_data();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  StoreFloat(data->data(), DType::kBFloat16, 2 * 6 + 5, nan);
  model_.layers[0].shared_intermediate_size = 3;
  ASSERT_TRUE(Validate(request).ok()) << Validate(request).status();
  EXPECT_FALSE(Validate(request)->call->include_shared_experts);
  request.mutable_options()->set_include_shared_experts(true);
  const auto refused = Validate(request).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_THAT(GetCallErrorDetails(refused)->field, testing::StartsWith("hidden_states"));
  StoreFloat(data->data(), DType::kBFloat16, 2 * 6 + 5, 1.0f);
  ASSERT_TRUE(Validate(request).ok()) << Validate(request).status();
  EXPECT_TRUE(Validate(request)->call->include_shared_experts);
  EXPECT_EQ(Validate(request)->num_tokens_without_expert, 1);
}

TEST_F(ForwardValidationTest, SlotsAreForTheModelsOwnTopK) {
  validator_ = MakeValidator(&model_, DispatchMode::kAllToAllFixedCapacity);
  const auto dispatch = [this](int32_t topk) {
    const auto valid = Validate(GoodRequest(Target(), 4, topk));
    EXPECT_TRUE(valid.ok()) << valid.status();
    return valid->call->dispatch;
  };
  EXPECT_EQ(dispatch(2), DispatchMode::kAllToAllFixedCapacity);
  EXPECT_EQ(dispatch(3), DispatchMode::kAuto);
}

TEST_F(ForwardValidationTest, GivenTopKLeavesRanksNothingToRoute) {
  validator_ = MakeValidator(&model_, DispatchMode::kAllGatherReduceScatterMonolithic);
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  ASSERT_TRUE(Validate(request).ok()) << Validate(request).status();
  EXPECT_EQ(Validate(request)->call->dispatch, DispatchMode::kAllGatherReduceScatter);
  v1::Tensor* logits = request.mutable_router_logits();
  logits->set_dtype(v1::DATA_TYPE_FLOAT32);
  logits->add_shape(4);
  logits->add_shape(5);
  logits->set_data(std::string(4 * 5 * 4, '\0'));
  ASSERT_TRUE(Validate(request).ok()) << Validate(request).status();
  EXPECT_EQ(Validate(request)->call->dispatch, DispatchMode::kAllGatherReduceScatterMonolithic);
}

TEST_F(ForwardValidationTest, AnAnswerThatWouldNotFitIsRefusedBeforeItIsComputed) {
  ForwardLimits limits = validator_.limits();
  limits.max_output_bytes = 4 * 6 * 2;
  validator_ = ForwardValidator({&model_}, limits, &pool_);
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  EXPECT_TRUE(Validate(request).ok());
  request.mutable_options()->set_output_dtype(v1::DATA_TYPE_FLOAT32);
  EXPECT_EQ(GetCallErrorDetails(Validate(request).status())->reason, ErrorReason::kMessageTooLarge);
}

TEST_F(ForwardValidationTest, WithSeveralModelsTheNameIsNeeded) {
  ModelSpec other = TinyModel();
  other.name = "other";
  validator_ = ForwardValidator({&other, &model_}, validator_.limits(), &pool_);
  v1::ForwardRequest request = GoodRequest(Target(), 4, 2);
  EXPECT_EQ(Validate(request)->call->model, &model_);
  request.clear_model();
  EXPECT_EQ(Validate(request).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace expertmesh
