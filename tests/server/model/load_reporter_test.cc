#include "server/model/load_reporter.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kGib = int64_t{1} << 30;

class LoadReporterTest : public ::testing::Test {
 protected:
  LoadReporterOptions Options(bool is_terminal) {
    return {.is_terminal = is_terminal,
            .terminal_columns = 70,
            .write_terminal = [this](std::string_view text) { terminal_.emplace_back(text); },
            .log = [this](std::string_view text) { log_.emplace_back(text); },
            .now = [this] { return now_; }};
  }

  absl::Time now_ = absl::UnixEpoch();
  std::vector<std::string> terminal_;
  std::vector<std::string> log_;
};

TEST_F(LoadReporterTest, SaysFirstWhatIsNeededAndWhatThereIs) {
  LoadReporter reporter(Options(false), "m");
  reporter.Start(3 * kGib / 2, 8 * kGib);
  EXPECT_THAT(log_, ElementsAre("loading model m: its experts need 1.50 GiB of memory, 8.00 GiB "
                                "are available"));
}

TEST_F(LoadReporterTest, LogsAtIntervalsAndNothingToATerminal) {
  LoadReporter reporter(Options(false), "m");
  reporter.Start(4 * kGib, 8 * kGib);
  for (int tenth = 1; tenth <= 100; ++tenth) {
    now_ += absl::Milliseconds(100);
    reporter.Update(4 * kGib * tenth / 100, 4 * kGib);
  }
  reporter.Finish(absl::OkStatus());
  EXPECT_THAT(terminal_, IsEmpty());
  ASSERT_THAT(log_, SizeIs(4));
  EXPECT_THAT(log_[1], HasSubstr(" 50% 2.00 GiB of 4.00 GiB, 409.6 MiB/s, 5 s left"));
  EXPECT_THAT(log_[2], HasSubstr("100% 4.00 GiB of 4.00 GiB"));
  EXPECT_EQ(log_[3], "loaded model m: 4.00 GiB in 10.0 s");
}

TEST_F(LoadReporterTest, DrawsOneLineThatNeverWraps) {
  for (const std::string& name : {std::string("m"), std::string(200, 'x')}) {
    terminal_.clear();
    LoadReporter reporter(Options(true), name);
    reporter.Start(kGib, 8 * kGib);
    for (int tenth = 0; tenth <= 10; ++tenth) {
      now_ += absl::Milliseconds(200);
      reporter.Update(kGib * tenth / 10, kGib);
    }
    reporter.Finish(absl::OkStatus());
    ASSERT_THAT(terminal_, SizeIs(12));
    for (const std::string& line : terminal_) {
      EXPECT_EQ(line.substr(0, 4), "\r\x1b[K");
      EXPECT_LE(line.size(), 69u + 4 + (line.back() == '\n' ? 1 : 0));
    }
    EXPECT_EQ(terminal_.back().back(), '\n');
  }
}

TEST_F(LoadReporterTest, BarGrowsWithTheBytes) {
  LoadReporterOptions options = Options(true);
  options.terminal_columns = 120;
  LoadReporter reporter(std::move(options), "m");
  reporter.Start(kGib, kGib);
  const auto marks = [this](double share) {
    return std::count(terminal_.back().begin(), terminal_.back().end(), '#') /
               static_cast<double>(std::count_if(terminal_.back().begin(), terminal_.back().end(),
                                                 [](char c) { return c == '#' || c == '-'; })) -
           share;
  };
  for (const double share : {0.0, 0.5, 1.0}) {
    now_ += absl::Seconds(1);
    reporter.Update(static_cast<int64_t>(share * kGib), kGib);
    EXPECT_NEAR(marks(share), 0, 0.05);
  }
}

TEST_F(LoadReporterTest, FailureEndsTheBarWithoutClaimingSuccess) {
  LoadReporter reporter(Options(true), "m");
  reporter.Start(kGib, kGib);
  now_ += absl::Seconds(1);
  reporter.Update(kGib / 2, kGib);
  reporter.Finish(absl::InvalidArgumentError("bad"));
  EXPECT_EQ(terminal_.back().back(), '\n');
  EXPECT_THAT(log_, SizeIs(1));
}

TEST_F(LoadReporterTest, NothingToLoadIsWhole) {
  LoadReporter reporter(Options(false), "m");
  reporter.Start(0, kGib);
  now_ += absl::Seconds(6);
  reporter.Update(0, 0);
  EXPECT_THAT(log_.back(), HasSubstr("100% 0 bytes of 0 bytes"));
}

}  // namespace
}  // namespace expertmesh
