#include "server/cluster/rank_offer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/server/cluster/membership_group.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kIncarnation = MembershipGroup::kIncarnation;

TEST(RankOfferTest, RefusalsNameTheirReasonAndHarmNothing) {
  MembershipGroup group(2, 5);
  Membership& membership = group.membership();
  group.Stand();
  struct Case {
    ErrorReason reason;
    std::function<void(RankOffer&)> spoil;
    const char* text;
  };
  const std::vector<Case> cases = {
      {ErrorReason::kRankTaken, [](RankOffer&) {}, "host-1"},
      {ErrorReason::kProtocolMismatch, [](RankOffer& o) { o.protocol_version = 7; }, "7"},
      {ErrorReason::kWrongEpSize, [](RankOffer& o) { o.ep_size = 3; },
       "started for 3 ranks, this group has 2"},
      {ErrorReason::kWrongEpSize, [](RankOffer& o) { o.ep_size = 1; },
       "started for 1 rank, this group has 2"},
      {ErrorReason::kInvalidField, [](RankOffer& o) { o.ep_rank = 2; }, "ep_rank"},
      {ErrorReason::kInvalidField, [](RankOffer& o) { o.ep_rank = -1; }, "ep_rank"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].model = "x"; },
       "does not hold model m; it holds x, this group serves m (a model has its folder's name"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models.clear(); },
       "0 models instead of 1; it holds none, this group serves m"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].fingerprint = "beef"; },
       "model m has fingerprint beef, this group serves "},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].fingerprint = "beef"; },
       ": another checkpoint, or another version of it; start the rank with the group's"},
      {ErrorReason::kWrongModel,
       [](RankOffer& o) {
         o.models[0].fingerprint = "beef";
         o.models[0].layers[0].num_experts = 6;
       },
       "model m has 6 experts in layer "},
      {ErrorReason::kWrongModel,
       [](RankOffer& o) {
         o.models[0].fingerprint = "beef";
         o.models[0].layers.clear();
       },
       "model m has 0 MoE layers instead of 1, fingerprint beef"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].layers[0].layer = 4; }, "layer 4"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].layers.clear(); }, "0 MoE"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].layers[0].num_experts = 6; },
       "of 6 experts"},
      {ErrorReason::kWrongModel,
       [](RankOffer& o) {
         o.models[0].layers[0].expert_ids = {0, 1};
       },
       "placement"},
      {ErrorReason::kWrongModel, [](RankOffer& o) { o.models[0].layers[0].expert_ids = {3}; },
       "placement"},
  };
  for (const Case& c : cases) {
    RankOffer offer = group.Offer(1, 777);
    c.spoil(offer);
    const absl::Status status = membership.Join(offer).status();
    EXPECT_EQ(ReasonOf(status), c.reason) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text));
  }
  EXPECT_EQ(ReasonOf(membership.Heartbeat(kIncarnation + 1, 1)), ErrorReason::kStaleIncarnation);
  EXPECT_EQ(ReasonOf(membership.Heartbeat(kIncarnation, 99)), ErrorReason::kStaleEpoch);
  EXPECT_EQ(ReasonOf(membership.Attach(kIncarnation + 1, 1)), ErrorReason::kStaleIncarnation);
  EXPECT_EQ(ReasonOf(membership.Attach(kIncarnation, 1)), ErrorReason::kStaleEpoch);
  EXPECT_EQ(membership.epoch(), 1u);
  EXPECT_TRUE(membership.TakeActions().empty());
}

TEST(RankOfferTest, ARankOfAnotherInstructionSetIsRefused) {
  MembershipGroup group(3, 6);
  Membership& membership = group.membership();
  RankOffer offer = group.Offer(2, 1);
  offer.instruction_set = "avx2";
  ASSERT_TRUE(membership.Join(offer).ok());
  offer = group.Offer(0, 2);
  offer.instruction_set = "avx512_bf16";
  const absl::Status status = membership.Join(offer).status();
  EXPECT_EQ(ReasonOf(status), ErrorReason::kWrongInstructionSet) << status;
  for (const char* text : {"rank 0", "avx512_bf16", "rank 2", "avx2", "--isa"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
  // The only member may come back with another one; then that is the group's.
  offer = group.Offer(2, 1);
  offer.instruction_set = "portable";
  EXPECT_TRUE(membership.Join(offer).ok());
  offer = group.Offer(0, 2);
  offer.instruction_set = "portable";
  EXPECT_TRUE(membership.Join(offer).ok());
}

TEST(RankOfferTest, ARankThatHoldsWeightsAsAnotherTypeIsRefused) {
  MembershipGroup group(3, 6);
  Membership& membership = group.membership();
  RankOffer offer = group.Offer(2, 1);
  offer.models[0].weight_dtype = DType::kFloat8E4M3;
  ASSERT_TRUE(membership.Join(offer).ok());
  EXPECT_EQ(membership.View()[2].weight_dtypes.at("m"), DType::kFloat8E4M3);
  offer = group.Offer(0, 2);
  offer.models[0].weight_dtype = DType::kBFloat16;
  const absl::Status status = membership.Join(offer).status();
  EXPECT_EQ(ReasonOf(status), ErrorReason::kWrongModel) << status;
  for (const char* text : {"rank 0: holds the experts of model m as bfloat16",
                           "rank 2 as float8_e4m3", "--fp8_weights"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
  // The only member may come back with another one; then that is the group's.
  offer = group.Offer(2, 1);
  offer.models[0].weight_dtype = DType::kBFloat16;
  EXPECT_TRUE(membership.Join(offer).ok());
  offer = group.Offer(0, 2);
  offer.models[0].weight_dtype = DType::kBFloat16;
  EXPECT_TRUE(membership.Join(offer).ok());
}

}  // namespace
}  // namespace expertmesh
