// Steps that overlap, over real engines whose ranks are threads: what lanes do must change no byte,
// and they must overlap.

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/cluster/local_expert_group.h"
#include "server/control/step_controller.h"
#include "server/model/synthetic_weight_source.h"
#include "tests/server/cluster/thread_cluster.h"
#include "tests/server/control/control_fixture.h"

namespace expertmesh {
namespace {

constexpr int64_t kHidden = 40;
constexpr int32_t kExperts = 9;
constexpr int32_t kTopK = 3;

std::unique_ptr<SyntheticWeightSource> TwoLayers() {
  ModelSpec spec;
  spec.name = "synthetic";
  spec.architecture = "Qwen3MoeForCausalLM";
  spec.hidden_size = kHidden;
  spec.weight_dtype = DType::kBFloat16;
  for (const int32_t index : {2, 5}) {
    LayerSpec& layer = spec.layers.emplace_back();
    layer.index = index;
    layer.num_experts = kExperts;
    layer.topk = kTopK;
    layer.intermediate_size = 24;
  }
  return *SyntheticWeightSource::Create(spec, /*seed=*/3);
}

// The order in which one group's operations were called, and a gate for some of them.
class Journal {
 public:
  // Steps whose combine waits until the next step's dispatch was called: a step that is alone
  // would wait for ever.
  void ExpectOverlap() { expects_overlap_ = true; }
  // Another group's operations follow.
  void Restart() {
    ranks_.clear();
    num_overlaps_ = 0;
  }

  // True when nothing is wrong.
  bool Called(int32_t ep_rank, const CollectiveTag& tag) {
    std::unique_lock<std::mutex> lock(mutex_);
    Rank& rank = ranks_[ep_rank];
    if (tag.operation == 0) {
      rank.dispatch_of[tag.step] = tag.order;
      rank.dispatch_orders.insert(tag.order);
      changed_.notify_all();
      return true;
    }
    rank.combine_orders.insert(tag.order);
    // The place before is the step's own dispatch, the last step's combine, which was called before
    // since experts compute in turns, or else a follower's dispatch, which may come yet.
    const int64_t before = tag.order - 1;
    if (rank.combine_orders.count(before) > 0 || before == rank.dispatch_of[tag.step]) return true;
    ++num_overlaps_;
    return !expects_overlap_ || changed_.wait_for(lock, std::chrono::seconds(60), [&] {
      return rank.dispatch_orders.count(before) > 0;
    });
  }
  int64_t num_overlaps() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_overlaps_;
  }

 private:
  struct Rank {
    std::map<uint64_t, int64_t> dispatch_of;  // by step
    std::set<int64_t> dispatch_orders;
    std::set<int64_t> combine_orders;
  };
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int32_t, Rank> ranks_;
  bool expects_overlap_ = false;
  int64_t num_overlaps_ = 0;
};

class JournalCommunicator : public Communicator {
 public:
  JournalCommunicator(std::unique_ptr<Communicator> real, Journal* journal)
      : real_(std::move(real)), journal_(*journal) {}
  int32_t ep_rank() const override { return real_->ep_rank(); }
  int32_t ep_size() const override { return real_->ep_size(); }
  absl::Status AllToAllV(const AllToAllVParams& params, Stream& stream) override {
    EXPECT_TRUE(journal_.Called(ep_rank(), params.tag)) << "step " << params.tag.step;
    return real_->AllToAllV(params, stream);
  }
  absl::Status AllGatherV(const AllGatherVParams& params, Stream& stream) override {
    EXPECT_TRUE(journal_.Called(ep_rank(), params.tag)) << "step " << params.tag.step;
    return real_->AllGatherV(params, stream);
  }
  absl::Status Barrier(const CollectiveTag& tag, Stream& stream) override {
    return real_->Barrier(tag, stream);
  }
  void CloseOrder(int64_t order) override { real_->CloseOrder(order); }
  void Abort(const absl::Status& reason) override { real_->Abort(reason); }
  absl::Status status() const override { return real_->status(); }
  decltype(std::declval<const Communicator&>().bytes_sent()) bytes_sent() const override {
    return real_->bytes_sent();
  }

 private:
  const std::unique_ptr<Communicator> real_;
  Journal& journal_;
};

class StepControllerLanesTest : public testing::TestWithParam<int32_t> {
 protected:
  StepControllerLanesTest() {
    for (const LayerSpec& layer : source_->model().layers) {
      routers_.Add("synthetic", *NewRouter(source_->model(), layer, nullptr));
    }
  }

  void StartCluster(StepControllerOptions options) {
    controller_.reset();
    cluster_.reset();
    journal_.Restart();
    ThreadCluster::Options cluster_options;
    cluster_options.ep_size = GetParam();
    cluster_options.report = report_;
    cluster_options.wrap = [this](std::unique_ptr<Communicator> real) {
      return std::make_unique<JournalCommunicator>(std::move(real), &journal_);
    };
    auto cluster = ThreadCluster::Start(*source_, cluster_options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    options.max_inline_micros = -1;
    controller_ =
        std::make_unique<StepController>(options, &cluster_->group(), &routers_, SteadyClock());
  }

  struct Request {
    int32_t layer = 0;  // its place in the model
    int64_t num_tokens = 0;
    DispatchMode dispatch = DispatchMode::kAuto;
    std::vector<std::byte> hidden;
    std::vector<int32_t> ids;
    std::vector<float> weights;
    std::vector<float> logits;  // instead of ids and weights
  };

  static Request RandomRequest(std::mt19937_64& random, int64_t max_tokens) {
    constexpr DispatchMode kModes[] = {DispatchMode::kAuto,
                                       DispatchMode::kAllToAll,
                                       DispatchMode::kAllToAllFixedCapacity,
                                       DispatchMode::kAllGatherReduceScatter,
                                       DispatchMode::kAllGatherReduceScatterMonolithic,
                                       DispatchMode::kDirect};
    Request request;
    request.layer = static_cast<int32_t>(random() % 2);
    request.num_tokens = 1 + static_cast<int64_t>(random() % max_tokens);
    request.dispatch = kModes[random() % 6];
    std::normal_distribution<float> normal;
    request.hidden.resize(request.num_tokens * kHidden * 2);
    for (int64_t i = 0; i < request.num_tokens * kHidden; ++i) {
      StoreFloat(request.hidden.data(), DType::kBFloat16, i, normal(random));
    }
    for (int64_t i = 0; i < request.num_tokens * kTopK; ++i) {
      request.ids.push_back(static_cast<int32_t>(random() % (kExperts + 1)) - 1);
      request.weights.push_back(normal(random));
    }
    if (request.dispatch == DispatchMode::kAllGatherReduceScatterMonolithic) {
      request.logits.resize(request.num_tokens * kExperts);
      for (float& logit : request.logits) logit = normal(random);
    }
    return request;
  }

  std::shared_ptr<Answer> Submit(StepController& controller, ExpertGroup& group,
                                 const Request& request, ForwardCallId* id = nullptr) {
    const auto copy = [&](const void* data, size_t size_bytes) {
      Buffer buffer = *group.request_allocator()->Allocate(static_cast<int64_t>(size_bytes));
      std::memcpy(buffer.data(), data, size_bytes);
      return buffer;
    };
    auto call = std::make_unique<ForwardCall>();
    call->model = &source_->model();
    call->layer = &source_->model().layers[request.layer];
    call->num_tokens = request.num_tokens;
    call->activation_dtype = call->output_dtype = call->combine_dtype = DType::kBFloat16;
    call->routing = RoutingKind::kTopK;
    call->dispatch = request.dispatch;
    call->topk = kTopK;
    call->topk_ids = copy(request.ids.data(), request.ids.size() * 4);
    call->topk_weights = copy(request.weights.data(), request.weights.size() * 4);
    if (!request.logits.empty()) {
      call->routing = RoutingKind::kRouterLogits;
      call->router_logits = copy(request.logits.data(), request.logits.size() * 4);
      call->router_logits_dtype = DType::kFloat32;
    }
    call->hidden_states = copy(request.hidden.data(), request.hidden.size());
    auto answer = std::make_shared<Answer>();
    call->done = [answer](absl::StatusOr<ForwardResult> result) { answer->Set(std::move(result)); };
    const ForwardCallId given = controller.Submit(std::move(call), false);
    if (id != nullptr) *id = given;
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

  const std::unique_ptr<SyntheticWeightSource> source_ = TwoLayers();
  RouterTable routers_;
  Journal journal_;
  decltype(ThreadCluster::Options::report) report_;
  std::unique_ptr<ThreadCluster> cluster_;
  std::unique_ptr<StepController> controller_;
};

INSTANTIATE_TEST_SUITE_P(Ranks, StepControllerLanesTest, testing::Values(1, 2, 3, 4, 7));

TEST_P(StepControllerLanesTest, BytesAreThoseOfOneLane) {
  constexpr uint64_t kSeed = 5;
  SCOPED_TRACE(absl::StrCat("seed ", kSeed));
  std::mt19937_64 random(kSeed);
  std::vector<Request> requests;
  for (int i = 0; i < 60; ++i) requests.push_back(RandomRequest(random, 50));
  std::vector<std::vector<std::byte>> expected;
  {
    const auto group = *LocalExpertGroup::Create({.num_ranks = GetParam()});
    const WeightSource* sources[] = {source_.get()};
    ASSERT_TRUE(group->Load(sources).ok());
    StepController one_lane({}, group.get(), &routers_, SteadyClock());
    for (const Request& request : requests) {
      expected.push_back(Bytes(*Submit(one_lane, *group, request)));
    }
  }
  for (const int32_t lanes : {1, 2, 3, 4}) {
    SCOPED_TRACE(absl::StrCat(lanes, " lanes"));
    StepControllerOptions options;
    options.lanes = lanes;
    options.max_step_tokens = 16;  // so that calls are split, and their pieces overlap
    options.min_lane_pairs_per_expert = 0;
    ASSERT_NO_FATAL_FAILURE(StartCluster(options));
    std::vector<std::thread> threads;
    for (size_t first = 0; first < 3; ++first) {
      threads.emplace_back([&, first] {
        for (int round = 0; round < 3; ++round) {
          std::vector<std::shared_ptr<Answer>> answers;
          for (size_t i = first; i < requests.size(); i += 3) {
            answers.push_back(Submit(*controller_, cluster_->group(), requests[i]));
          }
          for (size_t i = first, n = 0; i < requests.size(); i += 3, ++n) {
            ASSERT_EQ(Bytes(*answers[n]), expected[i]) << "request " << i;
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(cluster_->group().epoch(), 1u);
    if (lanes == 1) {
      EXPECT_EQ(journal_.num_overlaps(), 0);
    } else {
      EXPECT_GT(journal_.num_overlaps(), 0);
    }
  }
}

// Where a follower was promised, no rank sends a step's results before the follower's rows have
// set out: the gate in the communicator lets nobody past who would not overlap.
TEST_P(StepControllerLanesTest, RowsOfTheNextStepTravelBeforeResultsGoHome) {
  journal_.ExpectOverlap();
  StepControllerOptions options;
  options.max_step_tokens = 64;
  options.min_lane_pairs_per_expert = 0;
  ASSERT_NO_FATAL_FAILURE(StartCluster(options));
  std::mt19937_64 random(9);
  std::vector<std::shared_ptr<Answer>> answers;
  for (int i = 0; i < 6; ++i) {
    Request request = RandomRequest(random, 700);
    request.dispatch = DispatchMode::kAllToAll;
    request.logits.clear();
    answers.push_back(Submit(*controller_, cluster_->group(), request));
  }
  for (const auto& answer : answers) Bytes(*answer);
  EXPECT_GT(journal_.num_overlaps(), 0) << controller_->Snapshot().steps << " steps";
}

// Calls that vanish while a follower is promised must not stop the step that waits for it.
TEST_P(StepControllerLanesTest, CancelledFollowersAreSkipped) {
  constexpr uint64_t kSeed = 11;
  SCOPED_TRACE(absl::StrCat("seed ", kSeed));
  std::mt19937_64 random(kSeed);
  StepControllerOptions options;
  options.max_step_tokens = 8;
  options.min_lane_pairs_per_expert = 0;
  ASSERT_NO_FATAL_FAILURE(StartCluster(options));
  for (int round = 0; round < 60; ++round) {
    std::vector<std::shared_ptr<Answer>> answers;
    std::vector<ForwardCallId> ids;
    for (int i = 0; i < 5; ++i) {
      Request request = RandomRequest(random, 40);
      request.dispatch = i % 2 == 0 ? DispatchMode::kAllToAll : DispatchMode::kDirect;
      request.logits.clear();
      answers.push_back(Submit(*controller_, cluster_->group(), request, &ids.emplace_back()));
    }
    for (int i = 1; i < 5; ++i) controller_->Cancel(ids[i]);
    for (const auto& answer : answers) {
      const absl::StatusCode code = answer->WaitCode();
      EXPECT_TRUE(code == absl::StatusCode::kOk || code == absl::StatusCode::kCancelled) << code;
    }
  }
  EXPECT_EQ(cluster_->group().epoch(), 1u);
  EXPECT_EQ(controller_->Snapshot().steps_lost, 0u);
}

// A rank's word about its output alone ends no epoch, whatever code it is: whoever believed that
// it did would wait for another epoch for ever.
TEST_P(StepControllerLanesTest, ALostOutputIsItsCallsOwnWhateverItsCode) {
  std::atomic<int> num_lost{0};
  std::atomic<absl::StatusCode> code{absl::StatusCode::kOk};
  report_ = [&](absl::StatusOr<RankStepResult> result) {
    if (result.ok() && code != absl::StatusCode::kOk) {
      result->output_error = absl::Status(code, "says the test");
      ++num_lost;
    }
    return result;
  };
  ASSERT_NO_FATAL_FAILURE(StartCluster({}));
  std::mt19937_64 random(13);
  for (const absl::StatusCode lost :
       {absl::StatusCode::kUnavailable, absl::StatusCode::kDeadlineExceeded,
        absl::StatusCode::kResourceExhausted}) {
    SCOPED_TRACE(absl::StatusCodeToString(lost));
    code = lost;
    EXPECT_EQ(Submit(*controller_, cluster_->group(), RandomRequest(random, 20))->WaitCode(),
              lost == absl::StatusCode::kResourceExhausted ? lost : absl::StatusCode::kInternal);
    code = absl::StatusCode::kOk;
    Bytes(*Submit(*controller_, cluster_->group(), RandomRequest(random, 20)));
  }
  EXPECT_GE(num_lost, 3);
  EXPECT_EQ(cluster_->group().epoch(), 1u);
}

}  // namespace
}  // namespace expertmesh
