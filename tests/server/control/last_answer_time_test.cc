#include "server/control/last_answer_time.h"

#include <gtest/gtest.h>

namespace expertmesh {
namespace {

absl::Duration BeforeDeadline(absl::Duration time) {
  const absl::Time now = absl::UnixEpoch() + absl::Hours(1);
  return now + time - LastAnswerTime(now + time, now, absl::Milliseconds(50));
}

TEST(LastAnswerTimeTest, ATenthOfTheTimeWithinBounds) {
  EXPECT_EQ(BeforeDeadline(absl::Milliseconds(400)), absl::Milliseconds(50));
  EXPECT_EQ(BeforeDeadline(absl::Milliseconds(500)), absl::Milliseconds(50));
  EXPECT_EQ(BeforeDeadline(absl::Seconds(1)), absl::Milliseconds(100));
  EXPECT_EQ(BeforeDeadline(absl::Seconds(2)), absl::Milliseconds(200));
  EXPECT_EQ(BeforeDeadline(absl::Milliseconds(2500)), absl::Milliseconds(250));
  EXPECT_EQ(BeforeDeadline(absl::Seconds(10)), absl::Milliseconds(250));
}

TEST(LastAnswerTimeTest, AQuarterOfShortTimesAFiftiethOfLongOnes) {
  EXPECT_EQ(BeforeDeadline(absl::Milliseconds(40)), absl::Milliseconds(10));
  EXPECT_EQ(BeforeDeadline(absl::Milliseconds(200)), absl::Milliseconds(50));
  EXPECT_EQ(BeforeDeadline(absl::Seconds(30)), absl::Milliseconds(600));
  EXPECT_EQ(BeforeDeadline(absl::Minutes(5)), absl::Seconds(6));
}

}  // namespace
}  // namespace expertmesh
