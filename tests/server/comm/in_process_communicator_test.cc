#include "server/comm/in_process_communicator.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
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

// Nobody has waited for its stream yet when the others are waited for.
TEST(InProcessCommunicatorTest, AStreamThatHasFailedFailsTheOthers) {
  for (const auto& new_stream : {NewInlineHostStream, NewThreadedHostStream}) {
    auto ranks = NewInProcessCommunicators(2);
    const std::vector<int64_t> counts = {8, 8};
    std::vector<std::vector<std::byte>> buffers(4, std::vector<std::byte>(16));
    std::vector<std::unique_ptr<Stream>> streams;
    for (int32_t self = 0; self < 2; ++self) streams.push_back(new_stream());
    ASSERT_TRUE(streams[1]->Enqueue([] { return absl::InternalError("broken"); }).ok());
    for (int32_t self = 0; self < 2; ++self) {
      AllToAllVParams params;
      params.send = buffers[self].data();
      params.send_bytes = counts;
      params.receive = buffers[2 + self].data();
      params.receive_bytes = counts;
      ASSERT_TRUE(ranks[self]->AllToAllV(params, *streams[self]).ok());
    }
    const absl::Status others = streams[0]->Wait(absl::Now() + absl::Seconds(60));
    EXPECT_EQ(others.code(), absl::StatusCode::kAborted) << others;
    EXPECT_THAT(std::string(others.message()), ::testing::HasSubstr("rank 1"));
    const absl::Status own = streams[1]->Wait(absl::Now() + absl::Seconds(60));
    EXPECT_EQ(own.code(), absl::StatusCode::kInternal) << own;
  }
}

}  // namespace
}  // namespace expertmesh
