#include "server/cluster/refusal_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/server/control/fake_clock.h"

namespace expertmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class RefusalLogTest : public testing::Test {
 protected:
  // What the log says of it.
  std::string Add(int32_t ep_rank, const std::string& why = "rank 1 is taken by 10.0.0.1") {
    testing::internal::CaptureStderr();
    log_.Add(ep_rank, "10.0.0.2", why);
    return testing::internal::GetCapturedStderr();
  }
  std::string TellDue() {
    testing::internal::CaptureStderr();
    log_.TellDue();
    return testing::internal::GetCapturedStderr();
  }

  FakeClock clock_;
  RefusalLog log_{&clock_};
};

TEST_F(RefusalLogTest, OneLineAtOnceThenOneAnIntervalWithTheirNumber) {
  EXPECT_THAT(Add(1), HasSubstr(" W a rank was refused ep_rank=1 address=10.0.0.2 "
                                "why=\"rank 1 is taken by 10.0.0.1\" times=1\n"));
  for (int second = 0; second < 100; ++second) {
    std::string lines = Add(1);
    EXPECT_EQ(lines.empty(), second == 0 || second % 10 != 0) << second;
    clock_.Advance(absl::Milliseconds(500));
    EXPECT_EQ(Add(1), "");
    clock_.Advance(absl::Milliseconds(500));
    if (!lines.empty()) {
      EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 1);
      EXPECT_THAT(lines, HasSubstr(" times=20\n"));
    }
  }
  EXPECT_THAT(TellDue(), HasSubstr(" times=20\n"));
  EXPECT_EQ(TellDue(), "");
  clock_.Advance(RefusalLog::kInterval);
  EXPECT_EQ(TellDue(), "");
  EXPECT_THAT(Add(1), HasSubstr(" times=1\n")) << "forgotten by now";
}

TEST_F(RefusalLogTest, EveryRankAndReasonHasALineOfItsOwn) {
  EXPECT_NE(Add(1), "");
  EXPECT_THAT(Add(2), HasSubstr("ep_rank=2 "));
  EXPECT_THAT(Add(1, "another fingerprint"), HasSubstr("another fingerprint"));
  EXPECT_EQ(Add(1) + Add(2) + Add(1, "another fingerprint"), "");
}

TEST_F(RefusalLogTest, WhoeverGivesAlwaysOtherReasonsFillsNeitherMemoryNorLog) {
  int num_lines = 0;
  for (int i = 0; i < 5000; ++i) {
    const std::string lines = Add(1, absl::StrCat(std::string(2000, 'x'), "\n"));
    num_lines += static_cast<int>(std::count(lines.begin(), lines.end(), '\n'));
    const std::string others = Add(1, absl::StrCat("reason ", i));
    num_lines += static_cast<int>(std::count(others.begin(), others.end(), '\n'));
  }
  EXPECT_EQ(num_lines, static_cast<int>(RefusalLog::kMaxKinds) + 1);
  clock_.Advance(RefusalLog::kInterval);
  EXPECT_THAT(TellDue(),
              AllOf(HasSubstr("xxx... times=4999\n"),
                    HasSubstr("why=\"others, of which there are too many to name\" times=4936\n")));
}

}  // namespace
}  // namespace expertmesh
