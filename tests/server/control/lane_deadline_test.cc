#include "server/control/lane_deadline.h"

#include <deque>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(30);

TEST(LaneDeadlineTest, AStepAloneHasItsOwnTime) {
  const absl::Time begun = absl::UnixEpoch();
  EXPECT_EQ(LaneDeadline(begun, 0, begun + absl::Hours(1), kTimeout), begun + kTimeout);
}

TEST(LaneDeadlineTest, TimeBehindAnotherStepIsNotItsOwn) {
  const absl::Time begun = absl::UnixEpoch();
  const absl::Time last = begun + absl::Seconds(20);
  EXPECT_EQ(LaneDeadline(begun, 1, last, kTimeout), last + kTimeout);
  EXPECT_EQ(LaneDeadline(begun, 1, begun - absl::Seconds(1), kTimeout), begun + kTimeout);
}

// Lanes that are never empty must not put the moment off at which a lost rank is noticed.
TEST(LaneDeadlineTest, DoesNotGrowWhileLanesAreKeptBusy) {
  for (const int64_t num_lanes : {2, 3, 8}) {
    absl::Time now = absl::UnixEpoch();
    std::deque<absl::Time> lanes;
    for (int step = 0; step < 1000; ++step) {
      const auto num_ahead = static_cast<int64_t>(lanes.size());
      lanes.push_back(LaneDeadline(now, num_ahead, lanes.empty() ? now : lanes.back(), kTimeout));
      EXPECT_LE(lanes.back() - now, num_lanes * kTimeout);
      EXPECT_GE(lanes.back() - now, kTimeout);
      now += absl::Milliseconds(1);
      if (static_cast<int64_t>(lanes.size()) == num_lanes) lanes.pop_front();
    }
  }
}

}  // namespace
}  // namespace expertmesh
