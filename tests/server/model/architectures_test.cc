#include "server/model/architectures.h"

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

std::string LayoutText(const Architecture& row) {
  std::string text;
  switch (row.layout) {
    case ExpertLayout::kPerExpert:
      text = "per expert";
      break;
    case ExpertLayout::kFused:
      text = "fused";
      break;
    case ExpertLayout::kFusedTransposed:
      text = "fused, transposed";
      break;
    case ExpertLayout::kFusedTransposedInterleaved:
      text = "fused, transposed, interleaved";
      break;
  }
  return row.tensors.gate_up_bias.empty() ? text : text + ", biases";
}

std::string ScoresText(const Architecture& row) {
  switch (row.scores) {
    case RouterSpec::Scores::kSoftmax:
      return "softmax";
    case RouterSpec::Scores::kSoftmaxOverTopK:
      return "softmax over top-k";
    case RouterSpec::Scores::kSigmoid:
      return "sigmoid";
    case RouterSpec::Scores::kSigmoidOfTopK:
      return "sigmoid of top-k";
    case RouterSpec::Scores::kSparseMixer:
      return "sparse mixer";
  }
  return "";
}

std::string RouterText(const Architecture& row) {
  std::string text = ScoresText(row);
  if (row.renormalize == Architecture::Renormalize::kAlways) text += ", renormalized";
  if (!row.keys.num_groups.empty()) {
    text += row.group_score == RouterSpec::GroupScore::kMax ? ", groups by best expert"
                                                            : ", groups by best two";
  }
  if (!row.tensors.correction_bias.empty()) text += ", correction bias";
  if (!row.tensors.router_bias.empty()) text += ", bias";
  if (row.apply_router_weight_on_input) text += ", weight on the input";
  return text;
}

std::string SharedText(const Architecture& row) {
  if (!row.tensors.shared_expert_gate.empty()) return "gated";
  return row.tensors.shared_down.empty() ? "" : "yes";
}

TEST(ArchitecturesTest, TheReadmeTellsOfEveryRow) {
  std::vector<std::string> expected;
  for (const Architecture& row : KnownArchitectures()) {
    expected.push_back("| " + row.title + " | `" + row.name + "` | " + LayoutText(row) + " | " +
                       RouterText(row) + " | " +
                       (SharedText(row).empty() ? "|" : SharedText(row) + " |"));
  }
  std::ifstream readme("server/model/README.md");
  ASSERT_TRUE(readme.is_open());
  std::vector<std::string> rows;
  std::string line;
  while (std::getline(readme, line)) {
    if (absl::StartsWith(line, "| ") && !absl::StartsWith(line, "| model")) rows.push_back(line);
  }
  EXPECT_THAT(rows, ::testing::ElementsAreArray(expected));
}

TEST(ArchitecturesTest, NamesAreUnique) {
  std::set<std::string> names;
  for (const Architecture& row : KnownArchitectures()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
  }
}

TEST(ArchitecturesTest, EveryRowHasTheTensorsOfItsLayout) {
  for (const Architecture& row : KnownArchitectures()) {
    SCOPED_TRACE(row.name);
    const bool per_expert = row.layout == ExpertLayout::kPerExpert;
    EXPECT_EQ(row.tensors.gate.empty(), !per_expert);
    EXPECT_EQ(row.tensors.up.empty(), !per_expert);
    EXPECT_EQ(row.tensors.gate_up.empty(), per_expert);
    EXPECT_FALSE(row.tensors.down.empty());
    EXPECT_FALSE(row.tensors.router.empty());
    for (const std::string* name : {&row.tensors.gate, &row.tensors.up, &row.tensors.down}) {
      EXPECT_EQ(absl::StrContains(*name, "{expert}"), per_expert && !name->empty()) << *name;
    }
    EXPECT_TRUE(absl::StrContains(row.layer_prefix, "{layer}"));
    const bool has_shared_size =
        !row.keys.shared_intermediate_size.empty() || !row.keys.num_shared_experts.empty();
    EXPECT_EQ(has_shared_size, !row.tensors.shared_down.empty());
    EXPECT_EQ(has_shared_size,
              !row.tensors.shared_gate.empty() || !row.tensors.shared_gate_up.empty());
  }
}

}  // namespace
}  // namespace expertmesh
