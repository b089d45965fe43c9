// Expert servers whose rows cross by NCCL: epochs form over it, steps run, and what breaks it ends
// the epoch as any other loss. The ranks compute on the CPU; NCCL is the fake one.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/server/cluster/random_moe.h"
#include "tests/server/comm/fake_nccl.h"
#include "tests/server/rpc/linked_ranks.h"

namespace expertmesh {
namespace {

constexpr DispatchMode kModes[] = {DispatchMode::kAllToAll, DispatchMode::kAllToAllFixedCapacity,
                                   DispatchMode::kAllGatherReduceScatter};

class NcclRanksTest : public testing::Test {
 protected:
  absl::StatusOr<std::vector<std::vector<std::byte>>> Run(LinkedRanks& ranks, DispatchMode mode) {
    choices_.strategy = mode;
    return RunTokens(ranks.group(), moe_, tokens_, choices_);
  }

  const RandomMoe moe_{RandomMoeShape{20, 12, 9, 4}, 1};
  const RandomTokens tokens_{moe_, 30, DType::kFloat32, 2};
  StepChoices choices_;
  const std::shared_ptr<FakeNccl> nccl_ = std::make_shared<FakeNccl>();
};

TEST_F(NcclRanksTest, StepsHaveTheSameBytesAsOverTcp) {
  LinkedRanks over_tcp(*moe_.source, {.ep_size = 3});
  LinkedRanks over_nccl(*moe_.source, {.ep_size = 3, .nccl = nccl_});
  for (const DispatchMode mode : kModes) {
    SCOPED_TRACE(static_cast<int>(mode));
    const auto expected = Run(over_tcp, mode);
    ASSERT_TRUE(expected.ok()) << expected.status();
    ExpectNearReference(moe_, tokens_, choices_, *expected);
    const auto outputs = Run(over_nccl, mode);
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    EXPECT_EQ(*outputs, *expected);
  }
  EXPECT_GT(nccl_->num_sends(), 0);
  EXPECT_EQ(nccl_->misuses(), "");
}

TEST_F(NcclRanksTest, OneRankFormsAnEpochToo) {
  LinkedRanks ranks(*moe_.source, {.ep_size = 1, .nccl = nccl_});
  const auto outputs = Run(ranks, DispatchMode::kAllToAll);
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  ExpectNearReference(moe_, tokens_, choices_, *outputs);
  EXPECT_EQ(nccl_->num_live_comms(), 1);
}

TEST_F(NcclRanksTest, AnErrorOfNcclEndsTheEpochAndTheNextOneWorks) {
  LinkedRanks ranks(*moe_.source, {.ep_size = 3, .nccl = nccl_});
  const uint64_t epoch = ranks.group().epoch();
  FakeNccl::Faults faults;
  faults.group_end = NcclFunctions::Result::kRemoteError;
  nccl_->SetFaults(1, faults);
  EXPECT_FALSE(Run(ranks, DispatchMode::kAllToAll).ok());
  nccl_->SetFaults(1, {});
  ASSERT_TRUE(ranks.AwaitEpochAfter(epoch));
  const auto outputs = Run(ranks, DispatchMode::kAllToAll);
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  ExpectNearReference(moe_, tokens_, choices_, *outputs);
  EXPECT_EQ(nccl_->misuses(), "");
}

}  // namespace
}  // namespace expertmesh
