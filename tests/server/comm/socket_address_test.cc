#include "server/comm/socket_address.h"

#include <gtest/gtest.h>

namespace expertmesh {
namespace {

TEST(SocketAddressTest, TakesNumericAddresses) {
  EXPECT_EQ(SocketAddress::Parse("127.0.0.1", 5)->ToString(), "127.0.0.1:5");
  EXPECT_EQ(SocketAddress::Parse("::1", 5)->ToString(), "[::1]:5");
  EXPECT_EQ(SocketAddress::Parse("::ffff:127.0.0.1", 5)->port(), 5);
}

TEST(SocketAddressTest, RefusesWhatMeansEveryNetworkAndNames) {
  for (const char* address : {"0.0.0.0", "::", "::ffff:0.0.0.0", "localhost", "", "1.2.3"}) {
    EXPECT_EQ(SocketAddress::Parse(address, 0).status().code(), absl::StatusCode::kInvalidArgument)
        << address;
  }
}

TEST(SocketAddressTest, ListensOnlyOnAddressesOfThisMachine) {
  EXPECT_TRUE(SocketAddress::CheckListen("127.0.0.1").ok());
  EXPECT_EQ(SocketAddress::CheckListen("0.0.0.0").code(), absl::StatusCode::kInvalidArgument);
  // Of a network that exists in documents alone.
  const absl::Status status = SocketAddress::CheckListen("203.0.113.7");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "cannot listen on 203.0.113.7: Cannot assign requested address");
}

}  // namespace
}  // namespace expertmesh
