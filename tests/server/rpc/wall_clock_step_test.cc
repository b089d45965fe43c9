// Somebody sets the wall clock while the server works: no deadline, heartbeat or wait may notice.

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>

#include "absl/time/clock.h"
#include "grpcpp/client_context.h"
#include "kernels/base/steady_now.h"
#include "server/ops/clock.h"
#include "tests/server/cluster/random_moe.h"
#include "tests/server/ops/wall_clock.h"
#include "tests/server/rpc/forward_stream_fixture.h"
#include "tests/server/rpc/linked_ranks.h"

namespace expertmesh {
namespace {

constexpr absl::Duration kSteps[] = {absl::Hours(1), -absl::Hours(2)};

class WallClockStepTest : public testing::Test {
 protected:
  ~WallClockStepTest() override { SetWallClockOffset(absl::ZeroDuration()); }
};

TEST_F(WallClockStepTest, TheTestMovesTheWallClockAndNotTheSteadyOne) {
  const absl::Time wall = absl::Now(), steady = SteadyNow();
  SetWallClockOffset(absl::Hours(1));
  EXPECT_GE(absl::Now() - wall, absl::Hours(1));
  EXPECT_LT(SteadyNow() - steady, absl::Minutes(30));
  EXPECT_LT(SteadyClock()->Now() - steady, absl::Minutes(30));
}

TEST_F(WallClockStepTest, AWaitEndsWhenItsTimeIsOver) {
  for (const absl::Duration step : kSteps) {
    std::mutex mutex;
    std::condition_variable changed;
    std::unique_lock<std::mutex> lock(mutex);
    const absl::Time deadline = SteadyNow() + absl::Milliseconds(50);
    SetWallClockOffset(step);
    while (SteadyNow() < deadline) SteadyClock()->WaitUntil(changed, lock, deadline);
    EXPECT_LT(SteadyNow() - deadline, absl::Minutes(30));
  }
}

TEST_F(WallClockStepTest, CallsKeepTheirDeadlines) {
  StreamServer server;
  const auto stub = server.NewStub();
  uint64_t id = 0;
  for (const absl::Duration step : kSteps) {
    SCOPED_TRACE(absl::FormatDuration(step));
    const absl::Time begun = SteadyNow();
    ++id;
    std::future<bool> answered = std::async(std::launch::async, [&] {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(40));
      v1::ForwardResponse response;
      return stub->Forward(&context, server.Message(id).request(), &response).ok();
    });
    server.controller().AwaitHeld(1);
    const absl::Time deadline = server.controller().deadline(std::to_string(id));
    EXPECT_GT(deadline, begun);
    EXPECT_LE(deadline, SteadyNow() + absl::Seconds(41));
    SetWallClockOffset(step);
    EXPECT_GT(deadline, SteadyNow() - absl::Seconds(30));
    EXPECT_TRUE(server.controller().Answer(std::to_string(id)));
    EXPECT_TRUE(answered.get());
  }
}

TEST_F(WallClockStepTest, RanksStayMembersAndStepsRun) {
  const RandomMoe moe{RandomMoeShape{20, 12, 9, 4}, 1};
  const RandomTokens tokens{moe, 30, DType::kFloat32, 2};
  LinkedRanks::Options options;
  options.group.heartbeat_timeout = absl::Seconds(20);
  LinkedRanks ranks(*moe.source, options);
  const uint64_t epoch = ranks.group().epoch();
  for (const absl::Duration step : kSteps) {
    SCOPED_TRACE(absl::FormatDuration(step));
    SetWallClockOffset(step);
    // Whatever happens wakes the group's clock; this says nothing.
    ranks.group().OnEpochDown(0, 0);
    StepChoices choices;
    for (int i = 0; i < 20; ++i) {
      const auto outputs = RunTokens(ranks.group(), moe, tokens, choices);
      ASSERT_TRUE(outputs.ok()) << outputs.status();
    }
    for (const MemberView& member : ranks.group().Members()) {
      EXPECT_LT(member.heartbeat_age, absl::Minutes(1));
      EXPECT_GE(member.heartbeat_age, absl::ZeroDuration());
    }
    EXPECT_EQ(ranks.group().epoch(), epoch);
  }
}

}  // namespace
}  // namespace expertmesh
