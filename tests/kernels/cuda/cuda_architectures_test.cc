#include "kernels/cuda/cuda_architectures.h"

#include <string>

#include "gtest/gtest.h"

namespace expertmesh {
namespace {

struct Case {
  std::string architectures;
  int major;
  int minor;
  bool runs;
  bool tensor_cores;
};

TEST(CudaArchitecturesTest, WhatADeviceHasOfABuild) {
  const Case cases[] = {
      {"90a-real", 9, 0, true, true},
      {"90a-real", 8, 0, false, false},
      {"90a-real", 10, 0, false, false},
      {"80-real", 8, 0, true, false},
      {"80-real", 8, 9, true, false},
      {"80-real", 7, 5, false, false},
      {"80-real", 9, 0, false, false},
      {"100-real", 10, 0, true, false},
      {"100-real", 10, 3, true, false},
      {"100-real", 12, 0, false, false},
      {"86-real", 8, 0, false, false},
      {"80-real,90a-real,100-real", 8, 6, true, false},
      {"80-real,90a-real,100-real", 9, 0, true, true},
      {"80-real,90a-real,100-real", 10, 0, true, false},
      {"80-real,90a-real,100-real", 12, 0, false, false},
      {"90-real", 9, 0, true, false},
      {"80", 9, 0, true, false},
      {"80-virtual", 12, 1, true, false},
      {"90-virtual", 8, 9, false, false},
      {"", 9, 0, false, false},
      {"all", 9, 0, false, false},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.architectures + " on " + std::to_string(each.major) + "." +
                 std::to_string(each.minor));
    const CudaCode code = CudaCodeFor(each.architectures, each.major, each.minor);
    EXPECT_EQ(code.runs, each.runs);
    EXPECT_EQ(code.tensor_cores, each.tensor_cores);
  }
}

}  // namespace
}  // namespace expertmesh
