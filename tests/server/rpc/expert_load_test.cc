#include "server/rpc/expert_load.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>

namespace expertmesh {
namespace {

// "model/layer/expert" to tokens.
std::map<std::string, double> Series(const MetricFamily& family) {
  std::map<std::string, double> series;
  for (const MetricSample& sample : family.samples) {
    std::string name;
    for (const auto& [label, value] : sample.labels) name += (name.empty() ? "" : "/") + value;
    EXPECT_TRUE(series.emplace(name, sample.value).second) << name << " is there twice";
  }
  return series;
}

TEST(ExpertLoadTest, TheBusiestByNameAndTheRest) {
  ExpertLoad load;
  load.Count("m", 3, {5, 0, 9, 1});
  load.Count("m", 3, {5, 0, 1, 1});
  load.Count("m", 7, {0, 20, 0, 3});
  load.Count("other", 0, {4, 4});
  const auto series = Series(load.Top(3));
  // Equal ones by layer and number.
  EXPECT_EQ(series, (std::map<std::string, double>{{"m/7/1", 20},
                                                   {"m/3/0", 10},
                                                   {"m/3/2", 10},
                                                   {"m/rest/rest", 5},
                                                   {"other/0/0", 4},
                                                   {"other/0/1", 4},
                                                   {"other/rest/rest", 0}}));
}

TEST(ExpertLoadTest, AsManySeriesAsAskedFor) {
  ExpertLoad load;
  const std::vector<int64_t> counts(256, 1);
  for (int32_t layer = 0; layer < 60; ++layer) load.Count("m", layer, counts);
  EXPECT_EQ(load.Top(32).samples.size(), 33u);
  EXPECT_EQ(load.Top(1).samples.back().value, 60 * 256 - 1);
  EXPECT_TRUE(ExpertLoad().Top(32).samples.empty());
}

TEST(ExpertLoadTest, CountsFromManyThreadsAddUp) {
  ExpertLoad load;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&load] {
      for (int step = 0; step < 500; ++step) load.Count("m", step % 2, {1, 2});
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(
      Series(load.Top(9)),
      (std::map<std::string, double>{
          {"m/0/0", 1000}, {"m/0/1", 2000}, {"m/1/0", 1000}, {"m/1/1", 2000}, {"m/rest/rest", 0}}));
}

}  // namespace
}  // namespace expertmesh
