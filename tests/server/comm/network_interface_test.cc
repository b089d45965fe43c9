#include "server/comm/network_interface.h"

#include <gtest/gtest.h>

namespace expertmesh {
namespace {

TEST(NetworkInterfaceTest, KnowsTheLoopback) {
  const absl::StatusOr<std::string> name = InterfaceOfAddress("127.0.0.1");
  ASSERT_TRUE(name.ok()) << name.status();
  EXPECT_EQ(*name, "lo");
}

TEST(NetworkInterfaceTest, RefusesOtherMachinesAndNames) {
  // Kept for documentation; nobody has it.
  EXPECT_EQ(InterfaceOfAddress("192.0.2.1").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(InterfaceOfAddress("2001:db8::1").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(InterfaceOfAddress("localhost").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(InterfaceOfAddress("0.0.0.0").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace expertmesh
