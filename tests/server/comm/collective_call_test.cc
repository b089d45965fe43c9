#include "server/comm/collective_call.h"

#include <vector>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

TEST(CollectiveCallTest, BlocksLieBehindEachOtherWhereEachRankHasItsOwn) {
  CollectiveCall call;
  call.ep_size = 3;
  call.send_bytes = {5, 0, 7};
  call.receive_bytes = {1, 2, 3};
  call.kind = CollectiveCall::Kind::kAllToAllV;
  EXPECT_EQ(call.SendOffsets(), (std::vector<int64_t>{0, 5, 5}));
  EXPECT_EQ(call.ReceiveOffsets(), (std::vector<int64_t>{0, 1, 3}));
  call.kind = CollectiveCall::Kind::kAllGatherV;
  EXPECT_EQ(call.SendOffsets(), (std::vector<int64_t>{0, 0, 0})) << "one block for all";
  EXPECT_EQ(call.ReceiveOffsets(), (std::vector<int64_t>{0, 1, 3}));
}

TEST(CollectiveCallTest, TellsWhichItIs) {
  CollectiveCall call;
  call.tag = {.incarnation = 1, .epoch = 2, .step = 3, .operation = 4};
  EXPECT_EQ(call.ToString(), "Barrier of incarnation 1 epoch 2 step 3 operation 4");
  EXPECT_STREQ(CollectiveCall::KindName(static_cast<CollectiveCall::Kind>(77)),
               "an unknown operation");
}

}  // namespace
}  // namespace expertmesh
