#include "server/comm/socket_watch.h"

#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

constexpr int kPatienceMillis = 60000;

TEST(SocketWatchTest, TellsOfEverySocketOnceUnderItsKey) {
  SocketWatch watch;
  ASSERT_TRUE(watch.Open().ok());
  int pairs[2][2];
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pairs[i]), 0);
    ASSERT_TRUE(watch.Add(pairs[i][0], EPOLLIN, 10 + i).ok());
  }
  const UniqueFd fds[] = {UniqueFd(pairs[0][0]), UniqueFd(pairs[0][1]), UniqueFd(pairs[1][0]),
                          UniqueFd(pairs[1][1])};
  EXPECT_TRUE(watch.Wait(0).empty());
  ASSERT_EQ(write(pairs[1][1], "x", 1), 1);
  absl::Span<const epoll_event> events = watch.Wait(kPatienceMillis);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].data.u64, 11u);
  EXPECT_TRUE(watch.Wait(0).empty()) << "told already";
  // Beside a Wake, which is not told.
  ASSERT_EQ(write(pairs[0][1], "x", 1), 1);
  watch.Wake();
  events = watch.Wait(kPatienceMillis);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].data.u64, 10u);
}

TEST(SocketWatchTest, WakeEndsTheWaitOfAnotherThread) {
  SocketWatch watch;
  ASSERT_TRUE(watch.Open().ok());
  std::thread waker([&watch] { watch.Wake(); });
  EXPECT_TRUE(watch.Wait(-1).empty());
  waker.join();
  EXPECT_TRUE(watch.Wait(0).empty());
}

}  // namespace
}  // namespace expertmesh
