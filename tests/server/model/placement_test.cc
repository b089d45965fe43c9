#include "server/model/placement.h"

#include <numeric>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// What every placement promises: each expert has one owner, and local ids are the positions in the
// owner's ascending list.
void ExpectConsistent(const Placement& placement) {
  int32_t num_placed = 0;
  for (int32_t rank = 0; rank < placement.ep_size(); ++rank) {
    int32_t previous = -1;
    int32_t local_expert_id = 0;
    for (const int32_t expert_id : placement.local_experts(rank)) {
      EXPECT_GT(expert_id, previous);
      EXPECT_EQ(placement.owner_rank(expert_id), rank);
      EXPECT_EQ(placement.local_expert_id(expert_id), local_expert_id++);
      previous = expert_id;
      ++num_placed;
    }
  }
  EXPECT_EQ(num_placed, placement.num_experts());
}

TEST(PlacementTest, ContiguousGivesTheFirstRanksOneMore) {
  const absl::StatusOr<Placement> placement = Placement::Contiguous(8, 3);
  ASSERT_TRUE(placement.ok()) << placement.status();
  EXPECT_THAT(placement->local_experts(0), ElementsAre(0, 1, 2));
  EXPECT_THAT(placement->local_experts(1), ElementsAre(3, 4, 5));
  EXPECT_THAT(placement->local_experts(2), ElementsAre(6, 7));
  ExpectConsistent(*placement);
}

TEST(PlacementTest, MoreRanksThanExpertsLeavesTheLastEmpty) {
  const absl::StatusOr<Placement> placement = Placement::Contiguous(2, 4);
  ASSERT_TRUE(placement.ok()) << placement.status();
  EXPECT_THAT(placement->local_experts(0), ElementsAre(0));
  EXPECT_THAT(placement->local_experts(1), ElementsAre(1));
  EXPECT_THAT(placement->local_experts(2), IsEmpty());
  EXPECT_THAT(placement->local_experts(3), IsEmpty());
}

TEST(PlacementTest, ContiguousSizesDifferByAtMostOne) {
  for (int32_t num_experts = 1; num_experts <= 65; ++num_experts) {
    for (int32_t ep_size = 1; ep_size <= 9; ++ep_size) {
      SCOPED_TRACE(testing::Message() << num_experts << " experts on " << ep_size << " ranks");
      const absl::StatusOr<Placement> placement = Placement::Contiguous(num_experts, ep_size);
      ASSERT_TRUE(placement.ok()) << placement.status();
      ExpectConsistent(*placement);
      for (int32_t rank = 0; rank < ep_size; ++rank) {
        const size_t expected = num_experts / ep_size + (rank < num_experts % ep_size ? 1 : 0);
        EXPECT_EQ(placement->local_experts(rank).size(), expected);
      }
    }
  }
}

TEST(PlacementTest, FromOwnersKeepsRandomOwners) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 50; ++round) {
    const int32_t ep_size = 1 + static_cast<int32_t>(random() % 7);
    std::vector<int32_t> owners(1 + random() % 64);
    for (int32_t& owner : owners) owner = static_cast<int32_t>(random() % ep_size);
    const absl::StatusOr<Placement> placement = Placement::FromOwners(owners, ep_size);
    ASSERT_TRUE(placement.ok()) << placement.status();
    ExpectConsistent(*placement);
    for (size_t e = 0; e < owners.size(); ++e) {
      EXPECT_EQ(placement->owner_rank(static_cast<int32_t>(e)), owners[e]);
    }
  }
}

TEST(PlacementTest, BadArgumentsAreNamed) {
  EXPECT_THAT(std::string(Placement::Contiguous(0, 1).status().message()),
              HasSubstr("num_experts is 0"));
  EXPECT_THAT(std::string(Placement::Contiguous(4, 0).status().message()),
              HasSubstr("ep_size is 0"));
  EXPECT_THAT(std::string(Placement::FromOwners({}, 2).status().message()),
              HasSubstr("owner_ranks is empty"));
  EXPECT_THAT(std::string(Placement::FromOwners({0, 2}, 2).status().message()),
              HasSubstr("owner_ranks[1] is 2; expected 0 to 1"));
  EXPECT_THAT(std::string(Placement::FromOwners({-1}, 2).status().message()),
              HasSubstr("owner_ranks[0] is -1"));
}

}  // namespace
}  // namespace expertmesh
