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

}  // namespace
}  // namespace expertmesh
