#include "tests/server/control/control_fixture.h"

#include <cstring>
#include <utility>

namespace expertmesh {

ModelSpec SmallModel() {
  ModelSpec model;
  model.name = "small";
  model.hidden_size = 8;
  model.weight_dtype = DType::kFloat32;
  for (const int32_t index : {1, 4}) {
    LayerSpec& layer = model.layers.emplace_back();
    layer.index = index;
    layer.num_experts = 6;
    layer.topk = 2;
    layer.intermediate_size = 4;
    layer.router.scores = RouterSpec::Scores::kSoftmaxOverTopK;
  }
  return model;
}

void Answer::Set(absl::StatusOr<ForwardResult> result) {
  std::lock_guard<std::mutex> lock(mutex_);
  EXPECT_FALSE(result_.has_value()) << "answered twice";
  result_.emplace(std::move(result));
  cv_.notify_all();
}

bool Answer::is_set() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return result_.has_value();
}

const absl::StatusOr<ForwardResult>& Answer::Wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!result_.has_value()) cv_.wait(lock);
  return *result_;
}

std::vector<float> OutputFloats(const ForwardResult& result) {
  std::vector<float> values;
  for (const OutputSpan& span : result.output) {
    EXPECT_NE(span.owner, nullptr);
    const size_t count = span.size_bytes / sizeof(float);
    values.resize(values.size() + count);
    std::memcpy(values.data() + values.size() - count, span.data, span.size_bytes);
  }
  return values;
}

void ExpectExact(const TestCall& call) {
  const absl::StatusOr<ForwardResult>& result = call.answer->Wait();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(OutputFloats(*result), call.expected);
}

ErrorReason ReasonOf(const absl::Status& status) {
  const auto details = GetCallErrorDetails(status);
  EXPECT_TRUE(details.has_value()) << status;
  return details.has_value() ? details->reason : ErrorReason::kInternalError;
}

absl::Status LostStep() {
  return CallError(ErrorReason::kStepLost, "a rank was lost, says the script");
}

ControlFixture::ControlFixture(int32_t ep_size) : model(SmallModel()), group(model, ep_size) {
  options.max_inline_micros = 1e9;
}

ControlFixture::~ControlFixture() {
  gate.Open();
  controller.reset();
}

StepController& ControlFixture::Start() {
  controller = std::make_unique<StepController>(options, &group, &routers, &clock);
  return *controller;
}

TestCall ControlFixture::MakeCall(const CallShape& shape) {
  TestCall test;
  test.call = std::make_unique<ForwardCall>();
  ForwardCall& call = *test.call;
  call.model = &model;
  call.layer = model.FindLayer(shape.layer);
  call.num_tokens = shape.num_tokens;
  call.activation_dtype = call.output_dtype = call.combine_dtype = DType::kFloat32;
  call.topk = shape.topk;

  const int64_t num_pairs = shape.num_tokens * shape.topk;
  const int64_t num_values = shape.num_tokens * model.hidden_size;
  std::vector<int32_t> ids = shape.ids;
  while (static_cast<int64_t>(ids.size()) < num_pairs) {
    ids.push_back(static_cast<int32_t>(random() % (call.layer->num_experts + 1)) - 1);
  }
  std::vector<float> weights(num_pairs);
  for (float& weight : weights) weight = 0.25f * static_cast<float>(1 + random() % 8);
  std::vector<float> hidden(num_values);
  for (float& value : hidden) value = static_cast<float>(static_cast<int>(random() % 17) - 8);
  test.expected.assign(num_values, 0.0f);
  for (int64_t i = 0; i < num_pairs; ++i) {
    if (ids[i] < 0) continue;
    const int64_t row = i / shape.topk * model.hidden_size;
    for (int64_t h = 0; h < model.hidden_size; ++h) {
      test.expected[row + h] += weights[i] * static_cast<float>(ids[i] + 1) * hidden[row + h];
    }
  }

  const auto fill = [this](const void* data, int64_t size_bytes) {
    Buffer buffer = *group.pool()->Allocate(size_bytes);
    if (size_bytes > 0) std::memcpy(buffer.data(), data, size_bytes);
    return buffer;
  };
  call.topk_ids = fill(ids.data(), num_pairs * 4);
  call.topk_weights = fill(weights.data(), num_pairs * 4);
  call.hidden_states = fill(hidden.data(), num_values * 4);
  test.hidden_begin = call.hidden_states.data();
  test.hidden_end = test.hidden_begin + num_values * 4;
  call.done = [answer = test.answer](absl::StatusOr<ForwardResult> result) {
    answer->Set(std::move(result));
  };
  return test;
}

ForwardCallId ControlFixture::Submit(TestCall& call, bool may_run_inline) {
  return controller->Submit(std::move(call.call), may_run_inline);
}

TestCall ControlFixture::SubmitBlocker() {
  TestCall blocker = MakeCall();
  const std::byte* rows = blocker.hidden_begin;
  group.script = [this, rows, next = std::move(group.script)](const GroupStep& step, int number) {
    for (const TokenShard& shard : step.shards) {
      if (shard.rows.empty() || shard.rows[0].data != rows) continue;
      blocker_running.Open();
      gate.Wait();
    }
    return next ? next(step, number) : absl::OkStatus();
  };
  Submit(blocker);
  blocker_running.Wait();
  return blocker;
}

void ControlFixture::ExpectNothingInFlight() {
  // Its answer comes after every earlier step has been put away.
  TestCall last = MakeCall();
  Submit(last);
  ExpectExact(last);
  const ControlSnapshot snapshot = controller->Snapshot();
  EXPECT_EQ(snapshot.calls_in_flight, 0);
  EXPECT_EQ(snapshot.tokens_in_flight, 0);
  EXPECT_EQ(snapshot.bytes_in_flight, 0);
  EXPECT_EQ(snapshot.queued_calls, 0);
  EXPECT_EQ(snapshot.queued_tokens, 0);
  EXPECT_FALSE(snapshot.step_running);
}

}  // namespace expertmesh
