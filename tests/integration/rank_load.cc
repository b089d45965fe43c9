#include "tests/integration/rank_load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/dtype.h"

namespace expertmesh {

std::string HeartbeatFlag() {
  return absl::StrCat("--heartbeat_timeout=", kHeartbeatTimeoutMillis, "ms");
}

v1::ForwardRequest RandomRequest(const v1::GetModelResponse& model, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const v1::LayerInfo& layer = model.layers(static_cast<int>(random() % model.layers_size()));
  const int64_t num_tokens = static_cast<int64_t>(random() % 60);
  const int32_t topk = 1 + static_cast<int32_t>(random() % 6);
  v1::ForwardRequest request;
  request.set_layer(layer.index());
  v1::Tensor* hidden = request.mutable_hidden_states();
  hidden->set_dtype(v1::DATA_TYPE_BFLOAT16);
  hidden->add_shape(num_tokens);
  hidden->add_shape(model.hidden_size());
  hidden->mutable_data()->resize(2 * num_tokens * model.hidden_size());
  for (int64_t i = 0; i < num_tokens * model.hidden_size(); ++i) {
    StoreFloat(hidden->mutable_data()->data(), DType::kBFloat16, i, normal(random));
  }
  request.mutable_topk()->set_topk(topk);
  for (int64_t i = 0; i < num_tokens * topk; ++i) {
    request.mutable_topk()->add_ids(static_cast<int32_t>(random() % (layer.num_experts() + 1)) - 1);
    request.mutable_topk()->add_weights(normal(random));
  }
  request.set_apply_router_weight_on_input(random() % 4 == 0);
  if (random() % 3 == 0) request.mutable_options()->set_combine(v1::COMBINE_PER_EXPERT);
  return request;
}

void AddRandomLogits(const v1::GetModelResponse& model, v1::DataType dtype, uint64_t seed,
                     v1::ForwardRequest* request) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const DType element = dtype == v1::DATA_TYPE_FLOAT16 ? DType::kFloat16 : DType::kFloat32;
  const int64_t num_tokens = request->hidden_states().shape(0);
  v1::Tensor* const logits = request->mutable_router_logits();
  for (const v1::LayerInfo& layer : model.layers()) {
    if (layer.index() != request->layer()) continue;
    const int64_t num_logits = num_tokens * layer.num_experts();
    logits->set_dtype(dtype);
    logits->add_shape(num_tokens);
    logits->add_shape(layer.num_experts());
    logits->mutable_data()->resize(DTypeBytes(element) * num_logits);
    for (int64_t i = 0; i < num_logits; ++i) {
      StoreFloat(logits->mutable_data()->data(), element, i, normal(random));
    }
  }
}

Oracle::Oracle(int32_t num_ranks, ServerUnderTest::Options options) {
  options.args.push_back(absl::StrCat("--local_ranks=", num_ranks));
  server_ = ServerUnderTest::Start(options);
  if (server_ == nullptr) return;
  const auto described = server_->GetModel("");
  EXPECT_TRUE(described.ok()) << described.status();
  if (described.ok()) model = *described;
}

std::string Oracle::Answer(const v1::ForwardRequest& request) {
  const CallOutcome outcome = server_->Forward(request);
  EXPECT_TRUE(outcome.ok()) << outcome;
  return outcome.response.output().data();
}

RankLoad::RankLoad(RankCluster* cluster, Oracle* oracle, uint64_t seed, Options options)
    : cluster_(cluster), options_(options) {
  for (uint64_t i = 0; i < 16; ++i) {
    requests_.push_back(RandomRequest(oracle->model, seed * 100 + i));
    answers_.push_back(oracle->Answer(requests_.back()));
  }
  for (int i = 0; i < options_.num_callers; ++i) threads_.emplace_back([this, i] { Run(i); });
}

void RankLoad::Stop() {
  stopping_ = true;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

bool RankLoad::WaitForAnswers(int64_t count) const {
  const int64_t wanted = num_ok_ + count;
  const absl::Time deadline = absl::Now() + kPlenty;
  while (num_ok_ < wanted && absl::Now() < deadline) std::this_thread::yield();
  return num_ok_ >= wanted;
}

void RankLoad::Run(size_t first) {
  for (size_t i = first; !stopping_; ++i) {
    const size_t which = i % requests_.size();
    // Held for the call's time: another one may take its place.
    const std::shared_ptr<ServerUnderTest> control = cluster_->shared_control();
    const absl::Time start = absl::Now();
    const CallOutcome outcome = control->Forward(requests_[which], options_.timeout);
    const absl::Duration took = absl::Now() - start;
    if (outcome.ok()) {
      EXPECT_EQ(outcome.response.output().data(), answers_[which]);
      ++num_ok_;
    } else {
      EXPECT_EQ(outcome.code, absl::StatusCode::kUnavailable) << outcome;
      if (!options_.control_may_die || !outcome.reason.empty()) {
        EXPECT_THAT(outcome.reason, ::testing::AnyOf("NO_EPOCH", "STEP_LOST")) << outcome;
      }
      ++num_unavailable_;
    }
    EXPECT_LT(took, options_.timeout + kPlenty / 2);
  }
}

}  // namespace expertmesh
