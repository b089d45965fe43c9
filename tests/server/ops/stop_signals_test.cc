#include "server/ops/stop_signals.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <future>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

TEST(StopSignalsTest, TellsOfASignalAfterAStrayOne) {
  StopSignals::Block();
  std::promise<int> told;
  StopSignals signals([&told](int signal_number) { told.set_value(signal_number); });
  kill(getpid(), SIGUSR2);  // pending together, the lower number comes first
  kill(getpid(), SIGTERM);
  std::future<int> first = told.get_future();
  ASSERT_EQ(first.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  EXPECT_EQ(first.get(), SIGTERM);
}

TEST(StopSignalsTest, EndsWithoutASignal) {
  StopSignals::Block();
  const StopSignals signals([](int) { FAIL(); });
}

}  // namespace
}  // namespace expertmesh
