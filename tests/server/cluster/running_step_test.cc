#include "server/cluster/running_step.h"

#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/ops/clock.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

absl::Status Outcome(RunningStep& step) {
  return step.Wait(*SteadyClock(), absl::InfinitePast()).status();
}

TEST(RunningStepTest, NamesTheRanksThatAreLate) {
  RunningStep one_late(3, nullptr);
  one_late.OnDone(0, RankStepResult());
  one_late.OnDone(2, RankStepResult());
  const absl::Status one = Outcome(one_late);
  EXPECT_EQ(one.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(std::string(one.message()), "rank 1 did not end its part of the step in time");

  RunningStep two_late(3, nullptr);
  two_late.OnDone(1, absl::AbortedError("rank 0 has left"));
  EXPECT_EQ(std::string(Outcome(two_late).message()),
            "ranks 0, 2 did not end their part of the step in time; rank 1: rank 0 has left");
}

TEST(RunningStepTest, ARanksOwnErrorDecidesAlone) {
  RunningStep step(3, nullptr);
  step.OnDone(1, absl::AbortedError("rank 0 aborted the communicator"));
  EXPECT_FALSE(step.is_decided());
  step.OnDone(0, absl::InternalError("its device is lost"));
  EXPECT_TRUE(step.is_decided());
  const absl::Status status = Outcome(step);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0: its device is lost"));
}

}  // namespace
}  // namespace expertmesh
