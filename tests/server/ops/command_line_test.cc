#include "server/ops/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/flags/flag.h"
#include "absl/time/time.h"

ABSL_FLAG(bool, test_bool, false, "A yes or no.");
ABSL_FLAG(int, test_int, 7, "A number.");
ABSL_FLAG(std::string, test_text, "", "Some text.");
ABSL_FLAG(absl::Duration, test_duration, absl::Seconds(1), "Some time.");
ABSL_FLAG(expertmesh::ByteSize, test_bytes, expertmesh::ByteSize{64 << 20}, "Some bytes.");

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(CommandLineTest, EveryForm) {
  const auto line = ParseCommandLine({"--test_bool", "--test_int=8", "--test_text", "a=b", "file",
                                      "--test_duration=1.5s", "--test_bytes=3KiB", "--", "--x"});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_FALSE(line->help);
  EXPECT_THAT(line->positionals, ElementsAre("file", "--x"));
  EXPECT_TRUE(absl::GetFlag(FLAGS_test_bool));
  EXPECT_EQ(absl::GetFlag(FLAGS_test_int), 8);
  EXPECT_EQ(absl::GetFlag(FLAGS_test_text), "a=b");
  EXPECT_EQ(absl::GetFlag(FLAGS_test_duration), absl::Milliseconds(1500));
  EXPECT_EQ(absl::GetFlag(FLAGS_test_bytes).bytes, 3072);
  ASSERT_TRUE(ParseCommandLine({"--notest_bool"}).ok());
  EXPECT_FALSE(absl::GetFlag(FLAGS_test_bool));
  EXPECT_TRUE(ParseCommandLine({"-h"})->help);
  EXPECT_FALSE(line->version);
  EXPECT_TRUE(ParseCommandLine({"--version"})->version);
}

TEST(CommandLineTest, ErrorsNameTheFlag) {
  for (const auto& [arg, name] : {std::pair{"--no_such_flag=1", "no_such_flag"},
                                  {"--test_int=seven", "test_int"},
                                  {"--test_int", "test_int"},
                                  {"--notest_int", "notest_int"},
                                  {"--test_bytes=5XiB", "test_bytes"},
                                  {"--test_bytes=-1", "test_bytes"},
                                  {"--test_bytes=1e30GiB", "test_bytes"},
                                  {"--test_duration=1", "test_duration"}}) {
    const auto line = ParseCommandLine({arg});
    EXPECT_EQ(line.status().code(), absl::StatusCode::kInvalidArgument) << arg;
    EXPECT_THAT(std::string(line.status().message()), HasSubstr(name));
  }
}

TEST(CommandLineTest, ErrorsSayWhatIsValid) {
  for (const auto& [arg, says] :
       {std::pair{"--test_duration=1",
                  "--test_duration is '1'; it takes a duration with its unit, "
                  "e.g. 500ms, 10s or 2m"},
        {"--test_duration", "--test_duration has no value; it takes a duration"},
        {"--test_int=seven", "--test_int is 'seven'; it takes a whole number"},
        {"--test_int=99999999999", "--test_int is '99999999999'"},
        {"--test_bytes=5XiB", "--test_bytes is '5XiB'; it takes a size, e.g. 4096, 64KiB"},
        {"--test_bool=perhaps", "--test_bool is 'perhaps'; it takes true or false"},
        {"--test_text", "--test_text has no value"},
        {"--test_durations=1s", "there is no flag --test_durations; did you mean --test_duration?"},
        {"--tets_int=1", "did you mean --test_int?"}}) {
    const auto line = ParseCommandLine({arg});
    EXPECT_EQ(line.status().code(), absl::StatusCode::kInvalidArgument) << arg;
    EXPECT_THAT(std::string(line.status().message()), HasSubstr(says));
  }
  EXPECT_THAT(std::string(ParseCommandLine({"--no_such_flag"}).status().message()),
              Not(HasSubstr("did you mean")));
}

TEST(CommandLineTest, TellsWhichFlagsWereSet) {
  const auto line = ParseCommandLine({"--test_bool", "--test_int", "8", "word"});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_THAT(line->flags, ElementsAre("test_bool", "test_int"));
}

TEST(CommandLineTest, DescribesOurFlagsAlone) {
  const std::string text = DescribeFlags("command_line_test.cc");
  EXPECT_THAT(text, HasSubstr("--test_bytes=64MiB\n      Some bytes."));
  EXPECT_THAT(text, HasSubstr("--test_text\n"));
  EXPECT_THAT(text, HasSubstr("500ms, 10s, 2m"));
  EXPECT_THAT(text, Not(HasSubstr("flagfile")));
}

}  // namespace
}  // namespace expertmesh
