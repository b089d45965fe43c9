#include "server/comm/in_process_communicator.h"

#include "gtest/gtest.h"
#include "tests/conformance/communicator_conformance.h"

namespace expertmesh {
namespace {

INSTANTIATE_TEST_SUITE_P(InProcess, CommunicatorConformance,
                         ::testing::ValuesIn(CommunicatorConformanceParams(
                             "in_process",
                             [](int32_t ep_size) { return NewInProcessCommunicators(ep_size); },
                             {CommunicatorDrive::kOneThread, CommunicatorDrive::kThreadPerRank,
                              CommunicatorDrive::kThreadedStreams})),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace expertmesh
