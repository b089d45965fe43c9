#include <atomic>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/host_buffer_pool.h"
#include "server/cluster/local_expert_group.h"
#include "server/ops/call_error.h"
#include "tests/server/cluster/random_moe.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

// Hands out memory until told not to.
class LimitedMemory : public Allocator {
 public:
  Device device() const override { return Device{}; }
  absl::StatusOr<Buffer> Allocate(int64_t size_bytes) override {
    if (num_left_.fetch_sub(1) <= 0) return absl::ResourceExhaustedError("no memory left");
    return pool_.Allocate(size_bytes);
  }
  void Leave(int64_t num_allocations) { num_left_ = num_allocations; }

 protected:
  void Free(std::byte* /*data*/, int64_t /*size_bytes*/) override { FAIL() << "all is the pool's"; }

 private:
  HostBufferPool pool_;
  std::atomic<int64_t> num_left_{int64_t{1} << 60};
};

void ExpectReason(const absl::Status& status, ErrorReason reason) {
  const std::optional<CallErrorDetails> details = GetCallErrorDetails(status);
  ASSERT_TRUE(details.has_value()) << status;
  EXPECT_EQ(details->reason, reason);
}

// Whether the step runs on the caller or on the ranks' threads.
class StepFailureTest : public ::testing::TestWithParam<bool> {
 protected:
  StepFailureTest() {
    LocalExpertGroupOptions options;
    options.num_ranks = 3;
    options.allocator = memory_;
    group_ = LoadGroup(moe_, options);
    choices_.on_caller = GetParam();
  }

  GroupStep Step() { return *MakeStep(*group_, moe_, tokens_, choices_, &hidden_); }

  absl::Status Run(GroupStep step) {
    return group_->RunStep(std::move(step), GetParam(), absl::Now() + absl::Seconds(100)).status();
  }

  void ExpectWorks() {
    const auto outputs = RunTokens(*group_, moe_, tokens_, choices_);
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    ExpectNearReference(moe_, tokens_, choices_, *outputs);
  }

  const std::shared_ptr<LimitedMemory> memory_ = std::make_shared<LimitedMemory>();
  const RandomMoe moe_{RandomMoeShape{20, 12, 9, 4}, 1};
  const RandomTokens tokens_{moe_, 30, DType::kFloat32, 2};
  StepChoices choices_;
  std::vector<std::vector<std::byte>> hidden_;
  std::unique_ptr<LocalExpertGroup> group_;
};

TEST_P(StepFailureTest, ABadSliceFailsTheWholeStepAndTheNextOneWorks) {
  const std::vector<std::function<void(GroupStep&)>> spoils = {
      [](GroupStep& step) { step.plan.slices[1].sum_rows[0] = 1 << 20; },
      [](GroupStep& step) { step.plan.slices[2].pair_local_expert[0] = 3; },
      [](GroupStep& step) { step.plan.slices[0].ep_rank = 1; },
      [](GroupStep& step) { step.plan.slices[1].header.strategy = DispatchMode::kPassthrough; },
      [](GroupStep& step) { step.plan.slices[1].header.strategy = DispatchMode::kDirect; },
      [](GroupStep& step) { step.shards[2].rows.pop_back(); },
      [](GroupStep& step) { step.shards[2].rows.back().num_rows = 2; },
      [](GroupStep& step) { step.shards[1].rows.back().data = nullptr; },
  };
  for (size_t i = 0; i < spoils.size(); ++i) {
    SCOPED_TRACE("case " + std::to_string(i));
    const uint64_t epoch = group_->epoch();
    GroupStep step = Step();
    spoils[i](step);
    const absl::Status status = Run(std::move(step));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(group_->epoch(), epoch + 1);
    ExpectWorks();
  }
}

TEST_P(StepFailureTest, ABadDirectStepFailsAndTheNextOneWorks) {
  const std::vector<std::function<void(GroupStep&)>> spoils = {
      [](GroupStep& step) { step.plan.slices[1].send_rows[0] = 1 << 20; },
      [](GroupStep& step) { step.plan.slices[2].header.strategy = DispatchMode::kAllToAll; },
      [](GroupStep& step) { step.shards[0].rows.pop_back(); },
      [](GroupStep& step) { step.shards[0].rows.back().num_rows = 2; },
      [](GroupStep& step) { step.shards[0].rows.back().data = nullptr; },
  };
  choices_.strategy = DispatchMode::kDirect;
  ExpectWorks();
  for (size_t i = 0; i < spoils.size(); ++i) {
    SCOPED_TRACE("case " + std::to_string(i));
    GroupStep step = Step();
    spoils[i](step);
    const absl::Status status = Run(std::move(step));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    ExpectWorks();
  }
}

TEST_P(StepFailureTest, SlicesThatDisagreeAreFound) {
  // Each is consistent in itself, but rank 1's is of another plan.
  GroupStep step = Step();
  StepChoices other = choices_;
  other.shard_sizes = {12, 10, 8};
  std::vector<std::vector<std::byte>> other_hidden;
  GroupStep other_step = *MakeStep(*group_, moe_, tokens_, other, &other_hidden);
  step.plan.slices[1] = other_step.plan.slices[1];
  const absl::Status status = Run(std::move(step));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  ExpectWorks();
}

TEST_P(StepFailureTest, UnknownLayer) {
  GroupStep step = Step();
  for (StepSlice& slice : step.plan.slices) slice.header.layer = 4;
  EXPECT_EQ(Run(std::move(step)).code(), absl::StatusCode::kNotFound);
  ExpectWorks();
}

TEST_P(StepFailureTest, AStepOfAnotherEpochHarmsNothing) {
  for (const bool incarnation : {false, true}) {
    const uint64_t epoch = group_->epoch();
    GroupStep step = Step();
    incarnation ? ++step.plan.slices[2].header.incarnation : ++step.plan.slices[2].header.epoch;
    const absl::Status status = Run(std::move(step));
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    ExpectReason(status, ErrorReason::kStepLost);
    EXPECT_EQ(group_->epoch(), epoch);
  }
}

TEST_P(StepFailureTest, WrongNumberOfParts) {
  GroupStep step = Step();
  step.shards.pop_back();
  EXPECT_EQ(Run(std::move(step)).code(), absl::StatusCode::kInvalidArgument);
  step = Step();
  step.plan.slices.pop_back();
  EXPECT_EQ(Run(std::move(step)).code(), absl::StatusCode::kInvalidArgument);
  ExpectWorks();
}

// Wherever in the step the memory ends, the step fails as a whole and nothing is left behind.
TEST_P(StepFailureTest, OutOfMemoryAtAnyPoint) {
  for (const DispatchMode strategy : {DispatchMode::kAllToAll, DispatchMode::kDirect}) {
    SCOPED_TRACE(DispatchModeName(strategy));
    choices_.strategy = strategy;
    bool succeeded = false;
    int64_t num_failures = 0;
    for (int64_t num_allocations = 0; !succeeded; ++num_allocations) {
      SCOPED_TRACE(std::to_string(num_allocations) + " allocations");
      ASSERT_LT(num_allocations, 100);
      // A group of its own, whose arenas hold nothing yet. Chunks are never reused by another step.
      LocalExpertGroupOptions options;
      options.num_ranks = 3;
      options.allocator = memory_;
      group_ = LoadGroup(moe_, options);
      memory_->Leave(num_allocations);
      const absl::Status status = Run(Step());
      memory_->Leave(int64_t{1} << 60);
      succeeded = status.ok();
      if (!succeeded) {
        ++num_failures;
        EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
      }
      ExpectWorks();
    }
    EXPECT_GE(num_failures, 3);  // an output and an arena for each rank
  }
}

INSTANTIATE_TEST_SUITE_P(All, StepFailureTest, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "on_caller" : "on_rank_threads");
});

class LoadTest : public ::testing::Test {
 protected:
  std::unique_ptr<LocalExpertGroup> Group(int32_t num_ranks) {
    LocalExpertGroupOptions options;
    options.num_ranks = num_ranks;
    return *LocalExpertGroup::Create(options);
  }

  const RandomMoe moe_{RandomMoeShape{20, 12, 9, 4}, 1};
  const WeightSource* const source_ = moe_.source.get();
};

TEST_F(LoadTest, EpochFormsWhenAllIsLoaded) {
  const auto group = Group(4);
  EXPECT_EQ(group->epoch(), 0u);
  EXPECT_NE(group->incarnation(), 0u);
  EXPECT_NE(group->incarnation(), Group(4)->incarnation());
  const absl::Status early = group->RunStep(GroupStep(), true, absl::InfiniteFuture()).status();
  EXPECT_EQ(early.code(), absl::StatusCode::kUnavailable);
  ExpectReason(early, ErrorReason::kNoEpoch);

  std::vector<LoadProgress> reports;
  const absl::Status loaded =
      group->Load(absl::MakeConstSpan(&source_, 1), [&](const LoadProgress& progress) {
        EXPECT_EQ(group->epoch(), 0u);
        reports.push_back(progress);
      });
  ASSERT_TRUE(loaded.ok()) << loaded;
  EXPECT_EQ(group->epoch(), 1u);
  ASSERT_EQ(reports.size(), 9u);
  EXPECT_EQ(reports.back().loaded_bytes, 9 * 3 * 20 * 12 * 4);
  EXPECT_EQ(reports.back().total_bytes, 9 * 3 * 20 * 12 * 4);
  EXPECT_EQ(group->placement("random", 3)->num_experts(), 9);
  EXPECT_EQ(group->placement("random", 0), nullptr);
  EXPECT_EQ(group->placement("other", 3), nullptr);
  EXPECT_EQ(group->Load(absl::MakeConstSpan(&source_, 1)).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(LoadTest, RefusesWhatDoesNotFitWithBothNumbers) {
  const auto group = Group(2);
  EXPECT_THAT(*group->NeedBytes(absl::MakeConstSpan(&source_, 1)),
              ::testing::ElementsAre(5 * 3 * 20 * 12 * 4, 4 * 3 * 20 * 12 * 4));
  const int64_t need = 9 * 3 * 20 * 12 * 4;
  const absl::Status status = group->Load(absl::MakeConstSpan(&source_, 1), nullptr, need - 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(need) + " bytes"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(need - 1) + " bytes"));
  EXPECT_EQ(group->epoch(), 0u);
  EXPECT_TRUE(group->Load(absl::MakeConstSpan(&source_, 1), nullptr, need).ok());
}

TEST_F(LoadTest, ABadExpertFailsTheLoad) {
  class BrokenSource : public WeightSource {
   public:
    explicit BrokenSource(const WeightSource& whole) : whole_(whole) {}
    const ModelSpec& model() const override { return whole_.model(); }
    absl::StatusOr<LoadedExpert> LoadExpert(int32_t layer, int32_t expert) const override {
      if (expert == 5) return absl::NotFoundError("no tensor of expert 5");
      return whole_.LoadExpert(layer, expert);
    }
    absl::StatusOr<LoadedGate> LoadGate(int32_t layer) const override {
      return whole_.LoadGate(layer);
    }

   private:
    const WeightSource& whole_;
  };
  const BrokenSource broken(*source_);
  const WeightSource* const broken_source = &broken;
  const auto group = Group(3);
  const absl::Status status = group->Load(absl::MakeConstSpan(&broken_source, 1));
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_EQ(group->epoch(), 0u);
}

TEST_F(LoadTest, BadOptions) {
  LocalExpertGroupOptions options;
  options.num_ranks = 0;
  EXPECT_EQ(LocalExpertGroup::Create(options).status().code(), absl::StatusCode::kInvalidArgument);
}

// Responses keep the bytes that they point at; the group may be gone by then.
TEST_F(LoadTest, OutputsOutliveTheGroup) {
  const RandomTokens tokens(moe_, 10, DType::kFloat32, 2);
  LocalExpertGroupOptions options;
  options.num_ranks = 2;
  auto group = LoadGroup(moe_, options);
  const StepChoices choices;
  const auto expected = *RunTokens(*group, moe_, tokens, choices);
  std::vector<std::vector<std::byte>> hidden;
  GroupStep step = *MakeStep(*group, moe_, tokens, choices, &hidden);
  const auto result = group->RunStep(std::move(step), true, absl::InfiniteFuture());
  ASSERT_TRUE(result.ok());
  group.reset();
  size_t token = 0;
  for (const ShardOutput& shard : result->shards) {
    for (int64_t row = 0; row < shard.num_rows; ++row, ++token) {
      const std::byte* const bytes = shard.rows + row * 20 * 4;
      EXPECT_EQ(std::vector<std::byte>(bytes, bytes + 20 * 4), expected[token]);
    }
  }
  EXPECT_EQ(token, 10u);
}

}  // namespace
}  // namespace expertmesh
