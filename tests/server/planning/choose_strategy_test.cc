#include "server/planning/choose_strategy.h"

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

TEST(ChooseStrategyTest, Table) {
  EXPECT_EQ(*ChooseStrategy(DispatchMode::kAuto, 1), DispatchMode::kPassthrough);
  EXPECT_EQ(*ChooseStrategy(DispatchMode::kAuto, 2), DispatchMode::kAllToAll);
  EXPECT_EQ(*ChooseStrategy(DispatchMode::kPassthrough, 1), DispatchMode::kPassthrough);
  EXPECT_EQ(*ChooseStrategy(DispatchMode::kAllToAll, 1), DispatchMode::kAllToAll);
  EXPECT_EQ(*ChooseStrategy(DispatchMode::kAllToAll, 7), DispatchMode::kAllToAll);
  for (const int32_t ep_size : {1, 2, 7}) {
    EXPECT_EQ(*ChooseStrategy(DispatchMode::kAllGatherReduceScatter, ep_size),
              DispatchMode::kAllGatherReduceScatter);
    EXPECT_EQ(*ChooseStrategy(DispatchMode::kDirect, ep_size), DispatchMode::kDirect);
  }
  for (const auto& [mode, ep_size] :
       {std::pair{DispatchMode::kPassthrough, 2}, {static_cast<DispatchMode>(99), 1}}) {
    EXPECT_EQ(ChooseStrategy(mode, ep_size).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace expertmesh
