#include "tests/gpu/result_table.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

TEST(ResultTableTest, TheFileHoldsEachRowOnceItIsAdded) {
  const std::string path = testing::TempDir() + "result_table_test.json";
  ResultTable table(path, "a device");
  for (size_t i = 1; i <= 3; ++i) {
    table.Add({.name = "row " + std::to_string(i), .value = 3, .unit = "x", .limit = 2});
    std::ifstream file(path);
    const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(json.is_object());
    EXPECT_EQ(json["device"], "a device");
    ASSERT_EQ(json["results"].size(), i);
    EXPECT_EQ(json["results"][i - 1]["name"], "row " + std::to_string(i));
    EXPECT_EQ(json["results"][i - 1]["ratio"], 1.5);
  }
  EXPECT_TRUE(table.is_written());
  ResultTable nowhere("/nowhere/there.json", "a device");
  nowhere.Add({.name = "row"});
  EXPECT_FALSE(nowhere.is_written());
}

}  // namespace
}  // namespace expertmesh
