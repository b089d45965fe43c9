#include "server/cluster/collective_order.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

TEST(CollectiveOrderTest, AFollowersRowsGoBeforeTheResultsOfTheStepThatPromisedIt) {
  CollectiveOrder order;
  const auto first = order.StartStep(1, true);
  const auto second = order.StartStep(1, true);
  const auto third = order.StartStep(1, false);
  EXPECT_EQ(first.dispatch, 0);
  EXPECT_EQ(second.dispatch, 1);
  EXPECT_EQ(first.combine, 2);
  EXPECT_EQ(third.dispatch, 3);
  EXPECT_EQ(second.combine, 4);
  EXPECT_EQ(third.combine, 5);
  // Another epoch counts from 0, and knows of no promise.
  order.StartStep(1, true);
  EXPECT_EQ(order.StartStep(2, false).dispatch, 0);
}

// Every place is some step's or skipped, once; a step's own are in order; and no step ends before
// one that was started before it.
TEST(CollectiveOrderTest, LeavesNoGap) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    CollectiveOrder order;
    std::vector<int64_t> places;
    bool is_promised = false;
    int64_t last_combine = -1;
    for (int step = 0; step < 200; ++step) {
      if (random() % 8 == 0) {
        const auto skipped = order.SkipFollower();
        ASSERT_EQ(skipped.has_value(), is_promised);
        if (skipped.has_value()) places.push_back(*skipped);
        is_promised = false;
      }
      is_promised = random() % 2 == 0;
      const auto given = order.StartStep(1, is_promised);
      EXPECT_LT(given.dispatch, given.combine);
      EXPECT_LT(last_combine, given.combine);
      last_combine = given.combine;
      places.push_back(given.dispatch);
      places.push_back(given.combine);
    }
    if (const auto skipped = order.SkipFollower(); skipped.has_value()) places.push_back(*skipped);
    std::sort(places.begin(), places.end());
    for (size_t i = 0; i < places.size(); ++i) ASSERT_EQ(places[i], static_cast<int64_t>(i));
  }
}

}  // namespace
}  // namespace expertmesh
