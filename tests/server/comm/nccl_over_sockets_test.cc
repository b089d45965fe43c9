// What the library that stands in for NCCL between processes does where the real one fails or
// hangs: two ranks, both in this process.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "server/comm/nccl_library.h"
#include "tests/integration/process.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"

namespace expertmesh {
namespace {

using Result = NcclFunctions::Result;

class NcclOverSocketsTest : public ::testing::Test {
 protected:
  struct Rank {
    NcclFunctions::Comm comm = nullptr;
    NcclFunctions::DeviceStream stream = nullptr;
    void* memory = nullptr;
  };

  void SetUp() override {
    ResetEmulatedCuda();
    auto opened = OpenNcclLibrary(SiblingBinary("libnccl_over_sockets.so"));
    ASSERT_TRUE(opened.ok()) << opened.status();
    nccl_ = *std::move(opened);
    NcclFunctions::UniqueId id;
    ASSERT_EQ(nccl_->GetUniqueId(&id), Result::kSuccess);
    for (int32_t rank = 0; rank < 2; ++rank) {
      ASSERT_EQ(nccl_->CommInitRank(&ranks_[rank].comm, 2, id, rank), Result::kInProgress);
      ASSERT_TRUE(nccl_->StreamCreate(&ranks_[rank].stream).ok());
      ASSERT_EQ(cudaMalloc(&ranks_[rank].memory, 64), cudaSuccess);
    }
    for (int32_t rank = 0; rank < 2; ++rank) ASSERT_EQ(Settle(rank), Result::kSuccess);
  }
  void TearDown() override {
    for (Rank& rank : ranks_) {
      if (rank.comm != nullptr) Abort(rank);
      ASSERT_TRUE(nccl_->StreamSynchronize(rank.stream).ok());
      nccl_->StreamDestroy(rank.stream);
      ASSERT_EQ(cudaFree(rank.memory), cudaSuccess);
    }
  }

  void Abort(Rank& rank) {
    ASSERT_EQ(nccl_->CommAbort(rank.comm), Result::kSuccess);
    rank.comm = nullptr;
  }

  // Until the rank's call is no longer in progress.
  Result Settle(int32_t rank) {
    Result state = Result::kInProgress;
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (state == Result::kInProgress && absl::Now() < deadline) {
      EXPECT_EQ(nccl_->CommGetAsyncError(ranks_[rank].comm, &state), Result::kSuccess);
    }
    return state;
  }
  void Send(int32_t rank, int64_t num_bytes) {
    ASSERT_EQ(nccl_->GroupStart(), Result::kSuccess);
    ASSERT_EQ(nccl_->Send(ranks_[rank].memory, num_bytes, 1 - rank, ranks_[rank].comm,
                          ranks_[rank].stream),
              Result::kSuccess);
    ASSERT_EQ(nccl_->GroupEnd(), Result::kInProgress);
    ASSERT_EQ(Settle(rank), Result::kSuccess);
  }
  void Receive(int32_t rank, int64_t num_bytes) {
    ASSERT_EQ(nccl_->GroupStart(), Result::kSuccess);
    ASSERT_EQ(nccl_->Recv(ranks_[rank].memory, num_bytes, 1 - rank, ranks_[rank].comm,
                          ranks_[rank].stream),
              Result::kSuccess);
    ASSERT_EQ(nccl_->GroupEnd(), Result::kInProgress);
    ASSERT_EQ(Settle(rank), Result::kSuccess);
  }
  // Asks so often that what can move has moved.
  bool IsDone(int32_t rank) {
    cudaError_t state = cudaErrorNotReady;
    const absl::Time until = absl::Now() + absl::Milliseconds(100);
    while (state == cudaErrorNotReady && absl::Now() < until) {
      state = cudaStreamQuery(static_cast<cudaStream_t>(ranks_[rank].stream));
    }
    return state == cudaSuccess;
  }

  std::shared_ptr<NcclFunctions> nccl_;
  Rank ranks_[2];
};

TEST_F(NcclOverSocketsTest, SizesThatDifferHangUntilTheAbort) {
  Send(0, 16);
  Receive(1, 24);
  EXPECT_FALSE(IsDone(0));
  EXPECT_FALSE(IsDone(1));
  EXPECT_EQ(Settle(0), Result::kSuccess);
  EXPECT_EQ(Settle(1), Result::kSuccess);
  Abort(ranks_[0]);
  Abort(ranks_[1]);
  EXPECT_TRUE(nccl_->StreamSynchronize(ranks_[0].stream).ok());
  EXPECT_TRUE(nccl_->StreamSynchronize(ranks_[1].stream).ok());
}

TEST_F(NcclOverSocketsTest, APeerThatDoesNotComeIsWaitedFor) {
  Send(0, 16);
  EXPECT_FALSE(IsDone(0));
  Receive(1, 16);
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (!(IsDone(0) && IsDone(1)) && absl::Now() < deadline) {
  }
  EXPECT_TRUE(IsDone(0));
  EXPECT_TRUE(IsDone(1));
}

TEST_F(NcclOverSocketsTest, AGonePeerIsARemoteError) {
  Abort(ranks_[1]);
  Result state = Result::kSuccess;
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (state == Result::kSuccess && absl::Now() < deadline) {
    ASSERT_EQ(nccl_->CommGetAsyncError(ranks_[0].comm, &state), Result::kSuccess);
  }
  EXPECT_EQ(state, Result::kRemoteError);
  EXPECT_THAT(nccl_->ErrorText(state, ranks_[0].comm),
              ::testing::HasSubstr("rank 1 closed its connection"));
}

TEST_F(NcclOverSocketsTest, APeerThatLeavesInPeaceIsNone) {
  ASSERT_EQ(nccl_->CommFinalize(ranks_[1].comm), Result::kInProgress);
  EXPECT_EQ(Settle(1), Result::kSuccess);
  ASSERT_EQ(nccl_->CommDestroy(ranks_[1].comm), Result::kSuccess);
  ranks_[1].comm = nullptr;
  EXPECT_FALSE([&] {
    Send(0, 16);
    return IsDone(0);
  }());
  EXPECT_EQ(Settle(0), Result::kSuccess);
}

}  // namespace
}  // namespace expertmesh
