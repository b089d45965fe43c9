#include "client/cli/text_table.h"

#include <gtest/gtest.h>

namespace expertmesh {
namespace {

TEST(TextTableTest, ColumnsAreAsWideAsWhatStandsInThem) {
  TextTable table({{"n", ColumnAlign::kRight}, {"name"}, {"size", ColumnAlign::kRight}, {"why"}});
  table.AddRow({"1", "a", "12345", ""});
  table.AddRow({"20", "", "6", "because it is so"});
  EXPECT_EQ(table.Text(),
            "   n  name   size  why\n"
            "   1  a     12345  -\n"
            "  20  -         6  because it is so\n");
}

TEST(TextTableTest, ColumnsWithoutAnythingAreLeftOut) {
  TextTable table({{"a"}, {"empty"}, {"b"}});
  table.AddRow({"1", "", "2"});
  EXPECT_EQ(table.Text(),
            "  a  b\n"
            "  1  2\n");
}

}  // namespace
}  // namespace expertmesh
