#include "server/ops/listen_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace expertmesh {
namespace {

TEST(ListenAddressTest, HostAndPort) {
  for (const char* value :
       {"127.0.0.1:0", "127.0.0.1:65535", "localhost:50051", "[::1]:1", "[::]:00080"}) {
    EXPECT_TRUE(CheckListenAddress("listen", value).ok()) << value;
  }
}

TEST(ListenAddressTest, AnythingElseNamesFlagValueAndLimit) {
  for (const char* value :
       {"", ":", "nonsense", ":50051", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536",
        "127.0.0.1:99999", "127.0.0.1:99999999999999999999", "127.0.0.1:-1", "127.0.0.1:+1",
        "127.0.0.1: 1", "127.0.0.1:1s", "127.0.0.1:http", "::1:80", "[]:80", "[::1:80"}) {
    const absl::Status status = CheckListenAddress("metrics_listen", value);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << value;
    EXPECT_EQ(status.message(), std::string("--metrics_listen is '") + value +
                                    "'; expected host:port or [v6]:port, the port 0 to 65535");
  }
}

TEST(ListenAddressTest, AddressesToCallHaveAPortOfTheirOwn) {
  for (const char* value : {"127.0.0.1:1", "host:65535", "[::1]:1", "dns:///host:1", "unix:/x"}) {
    EXPECT_TRUE(CheckCallAddress("target", value).ok()) << value;
  }
  for (const char* value : {"", "host", "127.0.0.1:0", "127.0.0.1:99999", "host:http", ":1"}) {
    const absl::Status status = CheckCallAddress("target", value);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << value;
    EXPECT_EQ(status.message(), std::string("--target is '") + value +
                                    "'; expected host:port or [v6]:port, the port 1 to 65535");
  }
}

TEST(ListenAddressTest, WhatOnlyThisMachineReaches) {
  for (const char* value : {"127.0.0.1:0", "127.8.9.1:50051", "localhost:1", "[::1]:1",
                            "[::ffff:127.0.0.1]:1", "unix:/run/x", "unix:x:1"}) {
    EXPECT_TRUE(IsLocalListenAddress(value)) << value;
  }
  for (const char* value :
       {"0.0.0.0:0", "10.0.0.1:50051", "[::]:1", "[::ffff:10.0.0.1]:1", "128.0.0.1:1", "host:1",
        "localhost.example:1", "127.0.0.1.example:1"}) {
    EXPECT_FALSE(IsLocalListenAddress(value)) << value;
  }
}

}  // namespace
}  // namespace expertmesh
