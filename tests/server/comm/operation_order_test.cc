#include "server/comm/operation_order.h"

#include <memory>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

struct NamedOperation {
  explicit NamedOperation(std::string its_name) : name(std::move(its_name)) {}
  std::string ToString() const { return name; }
  std::string name;
  Event done;
};

class OperationOrderTest : public ::testing::Test {
 protected:
  absl::Status Add(OperationPlace place, const std::string& name) {
    return order_.Add(place, std::make_shared<NamedOperation>(name), /*ep_rank=*/3);
  }
  // All whose turn has come.
  std::string TakeAll() {
    std::string names;
    while (order_.Next() != nullptr) {
      const std::string next = order_.Next()->name;
      names += order_.TakeNext()->name;
      EXPECT_EQ(names.substr(names.size() - next.size()), next);
    }
    EXPECT_EQ(order_.TakeNext(), nullptr);
    return names;
  }

  OperationOrder<NamedOperation> order_;
};

TEST_F(OperationOrderTest, GivesByPlaceWhatCameInAnyOrder) {
  ASSERT_TRUE(Add({1, 0}, "c").ok());
  ASSERT_TRUE(Add({0, 1}, "b").ok());
  EXPECT_EQ(TakeAll(), "");
  ASSERT_TRUE(Add({0, 0}, "a").ok());
  EXPECT_EQ(TakeAll(), "ab") << "order 0 may have more";
  order_.Close(0, 2);
  EXPECT_EQ(TakeAll(), "c");
  EXPECT_TRUE(order_.empty());
}

TEST_F(OperationOrderTest, PassesOrdersThatWereClosedBeforeTheirTurnAndEmptyOnes) {
  order_.Close(2, 1);
  order_.Close(1, 0);
  ASSERT_TRUE(Add({2, 0}, "b").ok());
  ASSERT_TRUE(Add({3, 0}, "c").ok());
  ASSERT_TRUE(Add({0, 0}, "a").ok());
  EXPECT_EQ(TakeAll(), "a");
  order_.Close(0, 1);
  EXPECT_EQ(TakeAll(), "bc");
  order_.Close(1, 5);  // is past
  EXPECT_EQ(TakeAll(), "");
}

TEST_F(OperationOrderTest, APlaceThatIsPastIsRefused) {
  order_.Close(0, 0);
  const absl::Status status = Add({0, 0}, "late");
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "rank 3 calls late at place 0, which is past");
  EXPECT_TRUE(order_.empty());
}

TEST_F(OperationOrderTest, TellsWhoWaits) {
  ASSERT_TRUE(Add({1, 0}, "b").ok());
  ASSERT_TRUE(Add({0, 0}, "a").ok());
  EXPECT_EQ(order_.DoneEvents().size(), 2u);
  order_.DoneEvents()[0].Signal();
  EXPECT_TRUE(order_.Next()->done.done());
  order_.clear();
  EXPECT_TRUE(order_.empty());
  EXPECT_EQ(order_.Next(), nullptr);
}

}  // namespace
}  // namespace expertmesh
