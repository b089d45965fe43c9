#include "server/cluster/local_expert_group.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/server/cluster/random_moe.h"

namespace expertmesh {
namespace {

constexpr DispatchMode kStrategies[] = {
    DispatchMode::kAllToAll, DispatchMode::kAllToAllFixedCapacity,
    DispatchMode::kAllGatherReduceScatter, DispatchMode::kDirect};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

int64_t Uniform(std::mt19937_64& random, int64_t first, int64_t last) {
  return std::uniform_int_distribution<int64_t>(first, last)(random);
}

DType AnyDType(std::mt19937_64& random) { return kDTypes[Uniform(random, 0, 2)]; }

template <typename T>
T OneOf(std::mt19937_64& random, std::initializer_list<T> values) {
  return values.begin()[Uniform(random, 0, static_cast<int64_t>(values.size()) - 1)];
}

using Owners = std::vector<int32_t>;

LocalExpertGroupOptions GroupOptions(int32_t num_ranks, CpuIsa isa, const Owners& owners) {
  LocalExpertGroupOptions options;
  options.num_ranks = num_ranks;
  options.isa = isa;
  if (!owners.empty()) {
    options.place = [owners](const ModelSpec&, const LayerSpec&, int32_t ep_size) {
      return Placement::FromOwners(owners, ep_size);
    };
  }
  return options;
}

Owners RandomOwners(std::mt19937_64& random, int32_t num_experts, int32_t num_ranks) {
  Owners owners(num_experts);
  for (int32_t& owner : owners) owner = static_cast<int32_t>(Uniform(random, 0, num_ranks - 1));
  return owners;
}

// Ranks, instruction set, activation dtype.
class WholeStepTest : public ::testing::TestWithParam<std::tuple<int32_t, CpuIsa, DType>> {
 protected:
  // Everything else by the seed. Odd sizes come by turn, so that no seed can miss them.
  void RunCase(uint64_t seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto [num_ranks, isa, activation_dtype] = GetParam();
    std::mt19937_64 random(seed * 1000 + num_ranks);
    constexpr int64_t kHiddenSizes[] = {1, 33, 2880, 64, 7};
    RandomMoeShape shape;
    shape.hidden_size = kHiddenSizes[seed % 5];
    // The reference is slow: what makes a case large must not come together.
    const bool wide = shape.hidden_size > 1000;
    shape.intermediate_size = wide ? 9 : Uniform(random, 1, 50);
    shape.num_experts =
        static_cast<int32_t>(wide ? Uniform(random, 1, 9) : OneOf(random, {1, 2, 5, 8, 33, 64}));
    shape.topk = static_cast<int32_t>(Uniform(random, 1, 16));
    shape.weight_dtype = OneOf(random, {activation_dtype, AnyDType(random)});
    shape.activation = OneOf(random, {Activation::kSiluMul, Activation::kSiluMul,
                                      Activation::kGeluMul, Activation::kClampedSwiGlu});
    if (seed % 2 == 0) {
      shape.shared_intermediate_size = wide ? 11 : Uniform(random, 1, 70);
      shape.shared_gated = Uniform(random, 0, 1) == 0;
    }
    const RandomMoe moe(shape, seed);
    LocalExpertGroupOptions options = GroupOptions(
        num_ranks, isa,
        Uniform(random, 0, 1) == 0 ? Owners() : RandomOwners(random, shape.num_experts, num_ranks));
    options.format = OneOf(random, {ActivationFormat::kContiguous, ActivationFormat::kBatched});
    const std::unique_ptr<LocalExpertGroup> group = LoadGroup(moe, options);
    ASSERT_NE(group, nullptr);

    const int64_t num_tokens = OneOf<int64_t>(random, {0, 1, 2, Uniform(random, 3, wide ? 6 : 30)});
    const RandomTokens tokens(moe, num_tokens, activation_dtype, seed);
    for (const CombineMode combine : {CombineMode::kSum, CombineMode::kPerExpert}) {
      for (const bool weight_on_input : {false, true}) {
        StepChoices choices;
        choices.combine = combine;
        choices.weight_on_input = weight_on_input;
        choices.include_shared_experts =
            shape.shared_intermediate_size > 0 && Uniform(random, 0, 4) > 0;
        choices.output_dtype = OneOf(random, {activation_dtype, AnyDType(random)});
        choices.combine_dtype = OneOf(random, {choices.output_dtype, DType::kFloat32});
        choices.on_caller = Uniform(random, 0, 1) == 0;
        if (Uniform(random, 0, 1) == 0) {
          choices.shard_sizes = MakeRandomShardSizes(random, num_tokens, num_ranks);
        }
        SCOPED_TRACE(std::string(CombineModeName(combine)) +
                     (weight_on_input ? ", weight on input" : "") +
                     (choices.include_shared_experts ? ", shared" : ""));
        const auto outputs = RunTokens(*group, moe, tokens, choices);
        ASSERT_TRUE(outputs.ok()) << outputs.status();
        ExpectNearReference(moe, tokens, choices, *outputs);
        for (const DispatchMode strategy : kStrategies) {
          if (strategy == DispatchMode::kDirect && choices.include_shared_experts) continue;
          choices.strategy = strategy;
          choices.on_caller = Uniform(random, 0, 1) == 0;
          const auto same = RunTokens(*group, moe, tokens, choices);
          ASSERT_TRUE(same.ok()) << same.status();
          EXPECT_EQ(*same, *outputs) << DispatchModeName(strategy);
        }
      }
    }
  }
};

TEST_P(WholeStepTest, IsNearTheReference) {
  for (uint64_t seed = 1; seed <= 10 && !HasFailure(); ++seed) RunCase(seed);
}

INSTANTIATE_TEST_SUITE_P(All, WholeStepTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 7),
                                            ::testing::ValuesIn(SupportedCpuIsas()),
                                            ::testing::ValuesIn(kDTypes)),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) + "ranks_" +
                                  CpuIsaName(std::get<1>(test.param)) + "_" +
                                  std::string(DTypeName(std::get<2>(test.param)));
                         });

// One rank computes while the others wait for its partials: their stages overlap.
TEST(StepTimingsTest, AddUpToNoMoreThanTheStepTook) {
  RandomMoeShape shape;
  shape.hidden_size = 256;
  shape.intermediate_size = 256;
  shape.num_experts = 4;
  shape.topk = 4;
  const RandomMoe moe(shape, 1);
  const auto group = LoadGroup(moe, GroupOptions(2, SupportedCpuIsas().back(), {0, 0, 0, 1}));
  ASSERT_NE(group, nullptr);
  const RandomTokens tokens(moe, 256, DType::kFloat32, 1);
  for (const bool on_caller : {false, true}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      StepChoices choices;
      choices.on_caller = on_caller;
      std::vector<std::vector<std::byte>> memory;
      absl::StatusOr<GroupStep> step = MakeStep(*group, moe, tokens, choices, &memory);
      ASSERT_TRUE(step.ok()) << step.status();
      const absl::Time begun = absl::Now();
      const absl::StatusOr<GroupStepResult> result =
          group->RunStep(*std::move(step), on_caller, absl::InfiniteFuture());
      const int64_t took = absl::ToInt64Microseconds(absl::Now() - begun);
      ASSERT_TRUE(result.ok()) << result.status();
      const StepTimings& timings = result->timings;
      EXPECT_GT(timings.compute_micros, 0);
      EXPECT_LE(timings.dispatch_micros + timings.compute_micros + timings.combine_micros, took + 1)
          << timings.dispatch_micros << " + " << timings.compute_micros << " + "
          << timings.combine_micros << (on_caller ? " on the caller" : "");
    }
  }
}

// Ranks, combine mode, weight on the input, shared experts.
class SameBytesTest
    : public ::testing::TestWithParam<std::tuple<int32_t, CombineMode, bool, bool>> {
 protected:
  static constexpr int64_t kTokens = 30;

  SameBytesTest() {
    num_ranks_ = std::get<0>(GetParam());
    choices_.combine = std::get<1>(GetParam());
    choices_.weight_on_input = std::get<2>(GetParam());
    choices_.include_shared_experts = std::get<3>(GetParam());
    choices_.combine_dtype = DType::kFloat16;
    choices_.output_dtype = DType::kBFloat16;
  }

  std::unique_ptr<LocalExpertGroup> Group(int32_t num_ranks, const Owners& owners,
                                          ActivationFormat format = ActivationFormat::kContiguous) {
    LocalExpertGroupOptions options = GroupOptions(num_ranks, SupportedCpuIsas().back(), owners);
    options.format = format;
    return LoadGroup(moe_, options);
  }

  // Outputs of all tokens by one step.
  std::vector<std::vector<std::byte>> All(LocalExpertGroup& group) {
    const auto outputs = RunTokens(group, moe_, tokens_, choices_);
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    return outputs.ok() ? *outputs : std::vector<std::vector<std::byte>>(kTokens);
  }

  // The tokens of `choices` have the bytes that they have in `expected`.
  void ExpectSame(LocalExpertGroup& group, const StepChoices& choices,
                  const std::vector<std::vector<std::byte>>& expected) {
    const auto outputs = RunTokens(group, moe_, tokens_, choices);
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    for (size_t i = 0; i < choices.tokens.size(); ++i) {
      ASSERT_EQ((*outputs)[i], expected[choices.tokens[i]]) << "token " << choices.tokens[i];
    }
  }

  const RandomMoe moe_{
      RandomMoeShape{48, 40, 16, 6, DType::kBFloat16, Activation::kSiluMul, 56, true}, 5};
  const RandomTokens tokens_{moe_, kTokens, DType::kBFloat16, 6};
  int32_t num_ranks_ = 1;
  StepChoices choices_;
};

TEST_P(SameBytesTest, AloneInAnyBatchAndInAnySplit) {
  std::mt19937_64 random(99);
  for (const bool contiguous : {true, false}) {
    const auto group =
        Group(num_ranks_,
              contiguous ? Owners() : RandomOwners(random, moe_.shape.num_experts, num_ranks_));
    const auto expected = All(*group);
    for (int64_t token = 0; token < kTokens; ++token) {
      StepChoices choices = choices_;
      choices.tokens = {token};
      choices.shard_sizes = MakeRandomShardSizes(random, 1, num_ranks_);
      ExpectSame(*group, choices, expected);
    }
    for (int round = 0; round < 30; ++round) {
      StepChoices choices = choices_;
      choices.tokens.resize(kTokens);
      std::iota(choices.tokens.begin(), choices.tokens.end(), 0);
      std::shuffle(choices.tokens.begin(), choices.tokens.end(), random);
      choices.tokens.resize(Uniform(random, 1, kTokens));
      choices.shard_sizes =
          MakeRandomShardSizes(random, static_cast<int64_t>(choices.tokens.size()), num_ranks_);
      choices.on_caller = round % 2 == 0;
      ExpectSame(*group, choices, expected);
      ASSERT_FALSE(HasFailure()) << "round " << round;
    }
  }
}

TEST_P(SameBytesTest, InBothFormats) {
  const auto contiguous = Group(num_ranks_, {});
  const auto batched = Group(num_ranks_, {}, ActivationFormat::kBatched);
  EXPECT_EQ(All(*contiguous), All(*batched));
}

TEST_P(SameBytesTest, ByEveryStrategyOnOneRank) {
  const auto group = Group(1, {});
  choices_.strategy = DispatchMode::kPassthrough;
  const auto expected = All(*group);
  for (const DispatchMode strategy : kStrategies) {
    if (strategy == DispatchMode::kDirect && choices_.include_shared_experts) continue;
    choices_.strategy = strategy;
    EXPECT_EQ(All(*group), expected) << DispatchModeName(strategy);
  }
}

TEST_P(SameBytesTest, ByEveryStrategyWhateverTheSplit) {
  std::mt19937_64 random(321);
  for (int round = 0; round < 5; ++round) {
    const auto group = Group(num_ranks_, RandomOwners(random, moe_.shape.num_experts, num_ranks_));
    choices_.strategy = DispatchMode::kAllToAll;
    const auto expected = All(*group);
    for (const DispatchMode strategy : kStrategies) {
      if (strategy == DispatchMode::kDirect && choices_.include_shared_experts) continue;
      choices_.strategy = strategy;
      choices_.shard_sizes = MakeRandomShardSizes(random, kTokens, num_ranks_);
      choices_.on_caller = Uniform(random, 0, 1) == 0;
      EXPECT_EQ(All(*group), expected) << DispatchModeName(strategy) << ", round " << round;
    }
    choices_.shard_sizes.clear();
  }
}

TEST_P(SameBytesTest, PerExpertWhereverTheExpertsAre) {
  if (choices_.combine != CombineMode::kPerExpert) return;  // kSum depends on the placement
  std::mt19937_64 random(123);
  const auto expected = All(*Group(1, {}));
  for (int round = 0; round < 5; ++round) {
    const auto group = Group(num_ranks_, RandomOwners(random, moe_.shape.num_experts, num_ranks_));
    choices_.shard_sizes = MakeRandomShardSizes(random, kTokens, num_ranks_);
    choices_.on_caller = round % 2 == 0;
    EXPECT_EQ(All(*group), expected) << "round " << round;
  }
}

// Such a token is zeros, or the shared experts' output.
TEST_P(SameBytesTest, SharedExpertsCountForTokensWithoutExperts) {
  const auto group = Group(num_ranks_, {});
  const auto outputs = All(*group);
  const std::vector<std::byte> zeros(outputs[0].size(), std::byte{0});
  int num_without = 0;
  for (int64_t token = 0; token < kTokens; ++token) {
    const int32_t* ids = tokens_.routing.topk_ids.data() + token * tokens_.routing.topk;
    if (std::any_of(ids, ids + tokens_.routing.topk, [](int32_t id) { return id >= 0; })) continue;
    ++num_without;
    EXPECT_EQ(outputs[token] == zeros, !choices_.include_shared_experts) << "token " << token;
  }
  EXPECT_GT(num_without, 0);
}

INSTANTIATE_TEST_SUITE_P(All, SameBytesTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 7, 20),
                                            ::testing::Values(CombineMode::kSum,
                                                              CombineMode::kPerExpert),
                                            ::testing::Bool(), ::testing::Bool()),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) + "ranks_" +
                                  CombineModeName(std::get<1>(test.param)) +
                                  (std::get<2>(test.param) ? "_weight_on_input" : "") +
                                  (std::get<3>(test.param) ? "_shared" : "");
                         });

}  // namespace
}  // namespace expertmesh
