#include "server/ops/few_of.h"

#include <gtest/gtest.h>

namespace expertmesh {
namespace {

TEST(FewOfTest, TellsTheFirstAndHowManyMore) {
  EXPECT_EQ(FewOf({}), "");
  EXPECT_EQ(FewOf({"a"}), "a");
  EXPECT_EQ(FewOf({"a", "b", "c"}, 2), "a, b, c");
  EXPECT_EQ(FewOf({"a", "b", "c", "d"}, 2), "a, b and 2 more");
  EXPECT_EQ(FewOf(std::vector<std::string>(1000, "x")), "x, x, x, x, x, x, x, x and 992 more");
}

}  // namespace
}  // namespace expertmesh
