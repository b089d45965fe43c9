#include "server/ops/shown_text.h"

#include <gtest/gtest.h>

#include <string>

namespace expertmesh {
namespace {

TEST(ShownTextTest, KeepsWhatPeopleRead) {
  EXPECT_EQ(ShownText("", 8), "");
  EXPECT_EQ(ShownText("rank 1's \"x\"", 100), "rank 1's \"x\"");
  EXPECT_EQ(ShownText("mod\u00e8le \u6a21\u578b \U0001f600", 100),
            "mod\u00e8le \u6a21\u578b \U0001f600");
}

TEST(ShownTextTest, ReplacesControlsAndWhatIsNoUtf8) {
  EXPECT_EQ(ShownText("\x1b[2J\r\n\x7f", 100), "?[2J???");
  EXPECT_EQ(ShownText(absl::string_view("\0", 1), 100), "?");
  EXPECT_EQ(ShownText("\xc2\x9b", 100), "??") << "a C1 control: also begins escape sequences";
  for (const char* bad : {"\x80", "\xc3", "\xff", "\xc0\xaf", "\xe0\x80\x80", "\xed\xa0\x80",
                          "\xf4\x90\x80\x80", "\xe6\xa8", "\xc3("}) {
    const std::string shown = ShownText(bad, 100);
    for (const char c : shown) EXPECT_TRUE(c == '?' || c == '(') << shown;
  }
}

TEST(ShownTextTest, IsCutBetweenCharacters) {
  EXPECT_EQ(ShownText("abcd", 4), "abcd");
  EXPECT_EQ(ShownText("abcde", 4), "abcd...");
  EXPECT_EQ(ShownText("abc\u00e8", 4), "abc...");
  EXPECT_EQ(ShownText("abc\u00e8", 5), "abc\u00e8");
}

}  // namespace
}  // namespace expertmesh
