#include "server/planning/choose_strategy.h"

#include <limits>
#include <string>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

StepTraffic Local(int32_t ep_size) { return {.ep_size = ep_size, .num_tokens = 1, .topk = 2}; }

DispatchMode Choose(DispatchMode requested, const StepTraffic& traffic) {
  const absl::StatusOr<StrategyChoice> choice = ChooseStrategy(requested, traffic);
  EXPECT_TRUE(choice.ok()) << choice.status();
  if (!choice.ok()) return DispatchMode::kAuto;
  EXPECT_NE(std::string(choice->reason), "");
  return choice->mode;
}

TEST(ChooseStrategyTest, AsRequested) {
  EXPECT_EQ(Choose(DispatchMode::kPassthrough, Local(1)), DispatchMode::kPassthrough);
  for (const int32_t ep_size : {1, 2, 7}) {
    for (const DispatchMode mode :
         {DispatchMode::kAllToAll, DispatchMode::kAllToAllFixedCapacity,
          DispatchMode::kAllGatherReduceScatter, DispatchMode::kAllGatherReduceScatterMonolithic,
          DispatchMode::kDirect}) {
      EXPECT_EQ(Choose(mode, Local(ep_size)), mode);
    }
  }
  for (const auto& [mode, ep_size] :
       {std::pair{DispatchMode::kPassthrough, 2}, {static_cast<DispatchMode>(99), 1}}) {
    EXPECT_EQ(ChooseStrategy(mode, Local(ep_size)).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  StepTraffic shared = Local(2);
  shared.include_shared_experts = true;
  EXPECT_EQ(ChooseStrategy(DispatchMode::kDirect, shared).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Choose(DispatchMode::kAllToAll, shared), DispatchMode::kAllToAll);
}

TEST(ChooseStrategyTest, Auto) {
  EXPECT_EQ(Choose(DispatchMode::kAuto, Local(1)), DispatchMode::kPassthrough);
  EXPECT_EQ(Choose(DispatchMode::kAuto, Local(2)), DispatchMode::kAllToAll);
  StepTraffic remote = {.ep_size = 4, .remote_ranks = true, .num_tokens = 16, .topk = 8};
  remote.bytes_per_row = kMaxDirectBytes / (16 * 4);  // a token has at most 4 owners
  EXPECT_EQ(Choose(DispatchMode::kAuto, remote), DispatchMode::kDirect);
  remote.include_shared_experts = true;
  EXPECT_EQ(Choose(DispatchMode::kAuto, remote), DispatchMode::kAllToAll);
  remote.include_shared_experts = false;
  ++remote.bytes_per_row;
  EXPECT_EQ(Choose(DispatchMode::kAuto, remote), DispatchMode::kAllToAll);
  remote.topk = 3;
  EXPECT_EQ(Choose(DispatchMode::kAuto, remote), DispatchMode::kDirect);
  remote.num_tokens = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Choose(DispatchMode::kAuto, remote), DispatchMode::kAllToAll);
  remote.num_tokens = 0;
  EXPECT_EQ(Choose(DispatchMode::kAuto, remote), DispatchMode::kDirect);
  remote.ep_size = 1;
  EXPECT_EQ(Choose(DispatchMode::kAuto, remote), DispatchMode::kPassthrough);
}

}  // namespace
}  // namespace expertmesh
