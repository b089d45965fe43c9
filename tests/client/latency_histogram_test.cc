#include "client/cli/latency_histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace expertmesh {
namespace {

int64_t NearestRank(const std::vector<int64_t>& sorted, double fraction) {
  const auto rank = static_cast<int64_t>(std::ceil(fraction * static_cast<double>(sorted.size())));
  return sorted[static_cast<size_t>(std::max<int64_t>(rank, 1) - 1)];
}

TEST(LatencyHistogramTest, SmallValuesAreExactAndOfTheNearestRank) {
  LatencyHistogram histogram;
  EXPECT_EQ(histogram.Percentile(0.99), 0);
  for (int64_t i = 1; i <= 100; ++i) histogram.Add(i);
  EXPECT_EQ(histogram.Percentile(0.0), 1);
  EXPECT_EQ(histogram.Percentile(0.50), 50);
  EXPECT_EQ(histogram.Percentile(0.95), 95);
  EXPECT_EQ(histogram.Percentile(0.99), 99);
  EXPECT_EQ(histogram.Percentile(1.0), 100);
  EXPECT_EQ(histogram.count(), 100);
  histogram.Clear();
  EXPECT_EQ(histogram.count(), 0);
  EXPECT_EQ(histogram.max(), 0);
  histogram.Add(7);
  EXPECT_EQ(histogram.Percentile(0.5), 7);
}

// With a larger one among them, for a percentile is never above the maximum.
TEST(LatencyHistogramTest, NoValueIsFurtherOffThanItsShare) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  for (int bit = 0; bit < 63; ++bit) {
    for (int64_t part = 0; part < 64; ++part) {
      const int64_t base = int64_t{1} << bit;
      const int64_t step = base / 64 * part;
      for (const int64_t value : {base + step, base + step - 1, base + step + 1}) {
        SCOPED_TRACE(value);
        LatencyHistogram histogram;
        for (int i = 0; i < 10; ++i) histogram.Add(value);
        histogram.Add(kMax);
        EXPECT_NEAR(static_cast<double>(histogram.Percentile(0.5)), static_cast<double>(value),
                    static_cast<double>(value) * 0.004);
        if (value < 256) {
          EXPECT_EQ(histogram.Percentile(0.5), value);
        }
        EXPECT_EQ(histogram.max(), kMax);
        EXPECT_EQ(histogram.Percentile(1.0), kMax);
      }
    }
  }
}

TEST(LatencyHistogramTest, PercentilesOfRandomLatencies) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 50; ++round) {
    std::lognormal_distribution<double> latency(2.0 + 0.25 * round, 1.5);
    LatencyHistogram histogram;
    std::vector<int64_t> values;
    for (int i = 0; i < 2000; ++i) {
      values.push_back(static_cast<int64_t>(latency(random)));
      histogram.Add(values.back());
    }
    std::sort(values.begin(), values.end());
    for (const double fraction : {0.01, 0.5, 0.95, 0.99, 0.999}) {
      const auto exact = static_cast<double>(NearestRank(values, fraction));
      EXPECT_NEAR(static_cast<double>(histogram.Percentile(fraction)), exact, exact * 0.004)
          << fraction << " of round " << round;
    }
    EXPECT_EQ(histogram.max(), values.back());
    EXPECT_EQ(histogram.count(), 2000);
  }
}

}  // namespace
}  // namespace expertmesh
