#include "server/comm/nccl_library.h"

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_allocator.h"
#include "kernels/cuda/cuda_stream.h"
#include "tests/conformance/communicator_conformance.h"
#include "tests/integration/process.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"
#include "tests/server/comm/fake_nccl_on_cuda.h"
#include "tests/server/comm/nccl_group.h"

namespace expertmesh {
namespace {

using ::testing::HasSubstr;

// The real library, which needs a GPU only from CommInitRank on.
TEST(NcclLibraryTest, OpensNccl) {
  const absl::StatusOr<std::shared_ptr<NcclFunctions>> nccl = OpenNcclLibrary("");
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  EXPECT_THAT((*nccl)->Describe(), ::testing::StartsWith("NCCL 2."));
  EXPECT_THAT((*nccl)->ErrorText(NcclFunctions::Result::kInvalidUsage, nullptr),
              HasSubstr("invalid usage"));
}

TEST(NcclLibraryTest, SaysWhereItLooked) {
  const absl::Status absent = OpenNcclLibrary("/nowhere/libnccl.so.2").status();
  EXPECT_EQ(absent.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(absent.message()), HasSubstr("/nowhere/libnccl.so.2"));
  const absl::Status other = OpenNcclLibrary("libm.so.6").status();
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other.message()), HasSubstr("libm.so.6 lacks ncclGetVersion"));
  const std::string partial = SiblingBinary("libnccl_without_recv.so");
  const absl::Status lacking = OpenNcclLibrary(partial).status();
  EXPECT_EQ(lacking.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(lacking.message()), ::testing::EndsWith(partial + " lacks ncclRecv"));
}

INSTANTIATE_TEST_SUITE_P(
    NcclOnCuda, CommunicatorConformance,
    ::testing::ValuesIn(CommunicatorConformanceParams(
        "nccl_cuda",
        [](int32_t ep_size) { return NewNcclGroup(ep_size, std::make_shared<FakeNcclOnCuda>()); },
        {CommunicatorDrive::kThreadedStreams},
        []() -> std::unique_ptr<Stream> { return CudaStreamPool(0).NewStream(); })),
    [](const auto& test) { return test.param.name; });

// The library that stands in for NCCL between processes, all ranks in this one.
INSTANTIATE_TEST_SUITE_P(NcclOverSockets, CommunicatorConformance,
                         ::testing::ValuesIn(CommunicatorConformanceParams(
                             "nccl_over_sockets",
                             [](int32_t ep_size) {
                               auto nccl =
                                   OpenNcclLibrary(SiblingBinary("libnccl_over_sockets.so"));
                               EXPECT_TRUE(nccl.ok()) << nccl.status();
                               return NewNcclGroup(ep_size, *nccl);
                             },
                             {CommunicatorDrive::kThreadedStreams},
                             []() -> std::unique_ptr<Stream> {
                               return CudaStreamPool(0).NewStream();
                             })),
                         [](const auto& test) { return test.param.name; });

// The exchange of one step and the experts of another share the device.
TEST(NcclOnCudaTest, ItsStreamHasTheHighestPriority) {
  ResetEmulatedCuda();
  FakeNcclOnCuda nccl;
  NcclFunctions::DeviceStream stream = nullptr;
  ASSERT_TRUE(nccl.StreamCreate(&stream).ok());
  int least = 0;
  int greatest = 0;
  ASSERT_EQ(cudaDeviceGetStreamPriorityRange(&least, &greatest), cudaSuccess);
  int priority = 0;
  ASSERT_EQ(cudaStreamGetPriority(static_cast<cudaStream_t>(stream), &priority), cudaSuccess);
  EXPECT_EQ(priority, greatest);
  EXPECT_LT(priority, least);
  nccl.StreamDestroy(stream);
}

// Device memory that faults wherever the host, or a stream out of its turn, touches it; the seeds
// draw which stream moves on.
TEST(NcclOnCudaTest, MovesDeviceMemoryInTheStreamsOrder) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    ResetEmulatedCuda({.seed = seed});
    std::mt19937_64 random(seed);
    constexpr int32_t kRanks = 3;
    const auto nccl = std::make_shared<FakeNcclOnCuda>();
    auto ranks = NewNcclGroup(kRanks, nccl);
    std::vector<std::vector<int64_t>> counts(kRanks, std::vector<int64_t>(kRanks));
    for (auto& row : counts) {
      for (int64_t& count : row) count = random() % 3 == 0 ? 0 : 1 + random() % 3000;
    }
    CudaAllocator allocator(CudaMemory::kDevice, 0);
    struct Rank {
      std::vector<int64_t> send_counts, receive_counts;
      std::vector<char> bytes, back;
      Buffer send, receive;
      std::unique_ptr<CudaStream> stream = CudaStreamPool(0).NewStream();
    };
    std::vector<Rank> state(kRanks);
    for (int32_t self = 0; self < kRanks; ++self) {
      Rank& rank = state[self];
      for (int32_t peer = 0; peer < kRanks; ++peer) {
        rank.send_counts.push_back(counts[self][peer]);
        rank.receive_counts.push_back(counts[peer][self]);
        rank.bytes.insert(rank.bytes.end(), counts[self][peer], char('a' + self * kRanks + peer));
      }
      rank.send = allocator.Allocate(static_cast<int64_t>(rank.bytes.size())).value();
      int64_t num_received = 0;
      for (const int64_t count : rank.receive_counts) num_received += count;
      rank.receive = allocator.Allocate(num_received).value();
      rank.back.resize(num_received);
      ASSERT_TRUE(
          rank.stream->Copy(rank.send.data(), rank.bytes.data(), rank.send.size_bytes()).ok());
      AllToAllVParams params;
      params.tag.step = seed;
      params.send = rank.send.data();
      params.send_bytes = rank.send_counts;
      params.receive = rank.receive.data();
      params.receive_bytes = rank.receive_counts;
      ASSERT_TRUE(ranks[self]->AllToAllV(params, *rank.stream).ok());
      ASSERT_TRUE(rank.stream->Copy(rank.back.data(), rank.receive.data(), num_received).ok());
    }
    for (int32_t self = 0; self < kRanks; ++self) {
      const absl::Status status = state[self].stream->Wait(absl::Now() + absl::Seconds(60));
      ASSERT_TRUE(status.ok()) << status;
      std::vector<char> expected;
      for (int32_t peer = 0; peer < kRanks; ++peer) {
        expected.insert(expected.end(), counts[peer][self], char('a' + peer * kRanks + self));
      }
      EXPECT_EQ(state[self].back, expected) << "rank " << self;
    }
    ranks.clear();
    EXPECT_EQ(nccl->nccl().misuses(), "");
    state.clear();
    EXPECT_EQ(CountEmulatedCuda().streams, 0);
    EXPECT_EQ(CountEmulatedCuda().events, 0);
  }
}

// A device that is lost: the operation fails, on all ranks, and teardown ends.
TEST(NcclOnCudaTest, ALostDeviceFailsTheGroup) {
  ResetEmulatedCuda();
  const auto nccl = std::make_shared<FakeNcclOnCuda>();
  auto ranks = NewNcclGroup(2, nccl);
  const std::vector<int64_t> counts = {16, 16};
  std::vector<std::vector<std::byte>> buffers(4, std::vector<std::byte>(32));
  std::vector<std::unique_ptr<CudaStream>> streams;
  FailEmulatedWork(cudaErrorLaunchFailure);
  for (int32_t self = 0; self < 2; ++self) {
    streams.push_back(CudaStreamPool(0).NewStream());
    AllToAllVParams params;
    params.send = buffers[self].data();
    params.send_bytes = counts;
    params.receive = buffers[2 + self].data();
    params.receive_bytes = counts;
    static_cast<void>(ranks[self]->AllToAllV(params, *streams[self]));
  }
  for (int32_t self = 0; self < 2; ++self) {
    EXPECT_FALSE(streams[self]->Wait(absl::Now() + absl::Seconds(60)).ok());
  }
  ranks.clear();
  streams.clear();
  ResetEmulatedCuda();
}

}  // namespace
}  // namespace expertmesh
