#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/cluster/local_expert_group.h"
#include "server/control/step_controller.h"
#include "server/model/synthetic_weight_source.h"
#include "tests/server/control/control_fixture.h"

namespace expertmesh {
namespace {

constexpr int64_t kHidden = 40;
constexpr int64_t kTokens = 23;
constexpr int32_t kTopK = 3;
constexpr int32_t kExperts = 9;

// The real ranks: what batching does must not change a byte.
class StepControllerLocalGroupTest : public testing::TestWithParam<int32_t> {
 protected:
  StepControllerLocalGroupTest() {
    ModelSpec spec;
    spec.name = "synthetic";
    spec.architecture = "Qwen3MoeForCausalLM";
    spec.hidden_size = kHidden;
    spec.weight_dtype = DType::kBFloat16;
    LayerSpec& layer = spec.layers.emplace_back();
    layer.index = 2;
    layer.num_experts = kExperts;
    layer.topk = kTopK;
    layer.intermediate_size = 24;
    layer.has_gate = true;
    layer.router.renormalize = true;
    source_ = *SyntheticWeightSource::Create(spec, /*seed=*/3);
    group_ = *LocalExpertGroup::Create({.num_ranks = GetParam()});
    const WeightSource* sources[] = {source_.get()};
    EXPECT_TRUE(group_->Load(sources).ok());
    auto gate = std::make_unique<LoadedGate>(*source_->LoadGate(2));
    routers_.Add("synthetic",
                 *NewRouter(source_->model(), source_->model().layers[0], std::move(gate)));
    std::mt19937_64 random(8);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    hidden_.resize(kTokens * kHidden * 2);
    for (int64_t i = 0; i < kTokens * kHidden; ++i) {
      StoreFloat(hidden_.data(), DType::kBFloat16, i, normal(random));
    }
    logits_.resize(kTokens * kExperts * 2);
    for (int64_t i = 0; i < kTokens * kExperts; ++i) {
      StoreFloat(logits_.data(), DType::kFloat16, i, normal(random));
    }
    for (int64_t i = 0; i < kTokens * kTopK; ++i) {
      ids_.push_back(static_cast<int32_t>(random() % 10) - 1);
      weights_.push_back(0.1f + 0.01f * static_cast<float>(random() % 50));
    }
  }

  void Start(StepControllerOptions options) {
    controller_ = std::make_unique<StepController>(options, group_.get(), &routers_, SteadyClock());
  }

  Buffer Copy(const void* data, int64_t size_bytes) {
    Buffer buffer = *group_->request_allocator()->Allocate(size_bytes);
    std::memcpy(buffer.data(), data, size_bytes);
    return buffer;
  }

  std::shared_ptr<Answer> Submit(int64_t first, int64_t count, RoutingKind routing,
                                 bool may_run_inline, DispatchMode dispatch = DispatchMode::kAuto) {
    auto call = std::make_unique<ForwardCall>();
    call->model = &source_->model();
    call->layer = &source_->model().layers[0];
    call->num_tokens = count;
    call->activation_dtype = call->output_dtype = call->combine_dtype = DType::kBFloat16;
    call->routing = routing;
    call->dispatch = dispatch;
    if (routing == RoutingKind::kTopK) {
      call->topk = kTopK;
      call->topk_ids = Copy(ids_.data() + first * kTopK, count * kTopK * 4);
      call->topk_weights = Copy(weights_.data() + first * kTopK, count * kTopK * 4);
    }
    if (routing == RoutingKind::kRouterLogits) {
      call->topk = kTopK;
      call->router_logits = Copy(logits_.data() + first * kExperts * 2, count * kExperts * 2);
      call->router_logits_dtype = DType::kFloat16;
    }
    call->hidden_states = Copy(hidden_.data() + first * kHidden * 2, count * kHidden * 2);
    auto answer = std::make_shared<Answer>();
    call->done = [answer](absl::StatusOr<ForwardResult> result) { answer->Set(std::move(result)); };
    controller_->Submit(std::move(call), may_run_inline);
    return answer;
  }

  static std::vector<std::byte> Bytes(const Answer& answer) {
    const absl::StatusOr<ForwardResult>& result = answer.Wait();
    EXPECT_TRUE(result.ok()) << result.status();
    std::vector<std::byte> bytes;
    if (!result.ok()) return bytes;
    for (const OutputSpan& span : result->output) {
      bytes.insert(bytes.end(), span.data, span.data + span.size_bytes);
    }
    return bytes;
  }

  std::unique_ptr<SyntheticWeightSource> source_;
  std::unique_ptr<LocalExpertGroup> group_;
  RouterTable routers_;
  std::unique_ptr<StepController> controller_;
  std::vector<std::byte> hidden_;
  std::vector<int32_t> ids_;
  std::vector<std::byte> logits_;  // float16
  std::vector<float> weights_;
};

INSTANTIATE_TEST_SUITE_P(Ranks, StepControllerLocalGroupTest, testing::Values(1, 2, 3, 4, 7));

TEST_P(StepControllerLocalGroupTest, InlineQueuedSplitMergedAloneAreTheSameBytes) {
  for (const RoutingKind routing : {RoutingKind::kTopK, RoutingKind::kServerGate}) {
    StepControllerOptions inline_options;
    inline_options.max_inline_micros = 1e9;
    Start(inline_options);
    const std::vector<std::byte> expected = Bytes(*Submit(0, kTokens, routing, true));
    ASSERT_EQ(expected.size(), static_cast<size_t>(kTokens * kHidden * 2));
    EXPECT_EQ(controller_->Snapshot().inline_steps, 1u);

    // On the ranks' threads.
    StepControllerOptions queued_options;
    queued_options.max_inline_micros = 0;
    Start(queued_options);
    EXPECT_EQ(Bytes(*Submit(0, kTokens, routing, true)), expected);
    EXPECT_EQ(controller_->Snapshot().inline_steps, 0u);

    queued_options.max_step_tokens = 4;
    queued_options.max_rank_pairs = 7;
    Start(queued_options);
    EXPECT_EQ(Bytes(*Submit(0, kTokens, routing, false)), expected);
    EXPECT_GE(controller_->Snapshot().steps, 6u);

    Start({});
    std::vector<std::shared_ptr<Answer>> singles;
    for (int64_t t = 0; t < kTokens; ++t) singles.push_back(Submit(t, 1, routing, false));
    std::vector<std::byte> together;
    for (const auto& single : singles) {
      const std::vector<std::byte> bytes = Bytes(*single);
      together.insert(together.end(), bytes.begin(), bytes.end());
    }
    EXPECT_EQ(together, expected);
  }
}

// Skew that would overflow the slots is split into more steps.
TEST_P(StepControllerLocalGroupTest, StepsFitTheSlotsOfAFixedCapacity) {
  // All of the first half's tokens go to one expert.
  std::fill_n(ids_.begin(), kTokens / 2 * kTopK, 3);
  for (const RoutingKind routing : {RoutingKind::kTopK, RoutingKind::kServerGate}) {
    Start({});
    const std::vector<std::byte> expected = Bytes(*Submit(0, kTokens, routing, false));
    for (const int64_t max_num_tokens : {1, 2, 5, 23}) {
      StepControllerOptions options;
      options.max_num_tokens = max_num_tokens;
      Start(options);
      const auto answer = Submit(0, kTokens, routing, false, DispatchMode::kAllToAllFixedCapacity);
      EXPECT_EQ(Bytes(*answer), expected);
      EXPECT_EQ((*answer->Wait()).strategy, DispatchMode::kAllToAllFixedCapacity);
      const uint64_t least = routing == RoutingKind::kTopK ? kTokens / 2 : 1;
      const uint64_t slots = max_num_tokens * GetParam();
      EXPECT_GE(controller_->Snapshot().steps, (least + slots - 1) / slots);
      EXPECT_LE(controller_->Snapshot().steps, (kTokens + slots - 1) / slots);
    }
  }
}

// The ranks route by the logits, given or made by the gate, and get the routing's bytes.
TEST_P(StepControllerLocalGroupTest, RanksThatRouteGiveTheSameBytes) {
  for (const RoutingKind routing : {RoutingKind::kRouterLogits, RoutingKind::kServerGate}) {
    Start({});
    const std::vector<std::byte> expected =
        Bytes(*Submit(0, kTokens, routing, false, DispatchMode::kAllGatherReduceScatter));
    for (const double max_inline_micros : {0.0, 1e9}) {
      for (const int64_t max_step_tokens : {1, 6, 100}) {
        StepControllerOptions options;
        options.max_inline_micros = max_inline_micros;
        options.max_step_tokens = max_step_tokens;
        Start(options);
        const auto answer =
            Submit(0, kTokens, routing, true, DispatchMode::kAllGatherReduceScatterMonolithic);
        EXPECT_EQ(Bytes(*answer), expected);
        EXPECT_EQ((*answer->Wait()).strategy, DispatchMode::kAllGatherReduceScatterMonolithic);
      }
    }
    EXPECT_NE(expected, std::vector<std::byte>(expected.size()));
  }
}

TEST_P(StepControllerLocalGroupTest, ThreadsThatShareStepsGetTheirOwnRows) {
  StepControllerOptions options;
  options.max_step_tokens = 16;
  Start(options);
  const std::vector<std::byte> expected = Bytes(*Submit(0, kTokens, RoutingKind::kTopK, false));
  std::vector<std::thread> threads;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      for (int i = 0; i < 40; ++i) {
        const int64_t first = random() % kTokens;
        const int64_t count = 1 + random() % (kTokens - first);
        const std::vector<std::byte> bytes =
            Bytes(*Submit(first, count, RoutingKind::kTopK, random() % 2 == 0));
        const auto begin = expected.begin() + first * kHidden * 2;
        ASSERT_EQ(bytes, std::vector<std::byte>(begin, begin + count * kHidden * 2))
            << "seed " << seed << " call " << i;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace expertmesh
