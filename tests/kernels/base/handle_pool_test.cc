#include "kernels/base/handle_pool.h"

#include <memory>
#include <set>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

class HandlePoolTest : public ::testing::Test {
 protected:
  ~HandlePoolTest() override {
    for (int* const handle : live_) delete handle;
  }

  std::shared_ptr<HandlePool<int*>> NewPool() {
    return std::make_shared<HandlePool<int*>>(
        [this]() -> absl::StatusOr<int*> {
          if (fails_) return absl::ResourceExhaustedError("no more");
          return *live_.insert(new int).first;
        },
        [this](int* handle) {
          live_.erase(handle);
          delete handle;
        });
  }

  bool fails_ = false;
  std::set<int*> live_;
};

TEST_F(HandlePoolTest, WhatIsReturnedIsTakenAgain) {
  auto pool = NewPool();
  auto first = pool->Take().value();
  auto second = pool->Take().value();
  EXPECT_NE(first, second);
  int* const returned = first.get();
  const auto copy = first;
  first.reset();
  EXPECT_NE(pool->Take()->get(), returned) << "a reference is left";
  EXPECT_EQ(live_.size(), 3u);
  fails_ = true;
  EXPECT_TRUE(pool->Take().ok()) << "one is idle";
  const auto third = pool->Take().value();
  EXPECT_EQ(pool->Take().status(), absl::ResourceExhaustedError("no more"));
}

TEST_F(HandlePoolTest, HandlesMayOutliveTheirPoolsOwner) {
  auto pool = NewPool();
  auto taken = pool->Take().value();
  pool.reset();
  EXPECT_EQ(live_.count(taken.get()), 1u);
  taken.reset();
  EXPECT_TRUE(live_.empty());
}

TEST_F(HandlePoolTest, AbandonedOnesAreNeverDestroyed) {
  auto pool = NewPool();
  auto taken = pool->Take().value();
  pool->Abandon();
  taken.reset();
  pool.reset();
  EXPECT_EQ(live_.size(), 1u);
}

}  // namespace
}  // namespace expertmesh
