// What stands behind a transfer on a stream is launched once NCCL has the transfer, and nobody is
// told of it before the transfer is known to have ended well.

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_allocator.h"
#include "kernels/cuda/cuda_stream.h"
#include "tests/kernels/cuda/emulated_cuda_runtime.h"
#include "tests/server/comm/fake_nccl_on_cuda.h"
#include "tests/server/comm/nccl_group.h"

namespace expertmesh {
namespace {

constexpr int64_t kBlock = 64;

class NcclDeviceOrderTest : public ::testing::Test {
 protected:
  // One rank's part of one lane's step: rows to the others and back again.
  struct Part {
    Buffer send, receive, returned, host;
    std::unique_ptr<CudaStream> stream;
    std::vector<int64_t> counts;
    Event launched;  // all that follows the last transfer
    Event done;
    std::atomic<bool> host_worked{false};
  };

  void Start(int32_t ep_size, uint64_t seed = 1) {
    allocators_ = nullptr;
    ResetEmulatedCuda({.seed = seed});
    allocators_ = std::make_unique<Allocators>();
    nccl_ = std::make_shared<FakeNcclOnCuda>();
    ranks_ = NewNcclGroup(ep_size, nccl_);
  }
  ~NcclDeviceOrderTest() override {
    HangEmulatedDevice(false);
    parts_.clear();
    ranks_.clear();
    if (nccl_ == nullptr) return;
    EXPECT_EQ(nccl_->nccl().misuses(), "");
    EXPECT_EQ(CountEmulatedCuda().streams, 0);
    EXPECT_EQ(CountEmulatedCuda().events, 0);
  }

  static absl::Time Soon() { return absl::Now() + absl::Seconds(60); }
  static char Byte(int32_t rank, int32_t peer, int32_t lane) {
    return static_cast<char>('a' + rank * 5 + peer + lane * 13);
  }

  Part& NewPart(int32_t rank, int32_t lane) {
    Part& part = *parts_.emplace_back(std::make_unique<Part>());
    const int32_t ep_size = ranks_[0]->ep_size();
    const int64_t size_bytes = kBlock * ep_size;
    part.counts.assign(ep_size, kBlock);
    part.send = allocators_->device.Allocate(size_bytes).value();
    part.receive = allocators_->device.Allocate(size_bytes).value();
    part.returned = allocators_->device.Allocate(size_bytes).value();
    part.host = allocators_->pinned.Allocate(size_bytes).value();
    part.stream = CudaStreamPool(0).NewStream();
    for (int32_t peer = 0; peer < ep_size; ++peer) {
      std::memset(part.host.data() + peer * kBlock, Byte(rank, peer, lane), kBlock);
    }
    return part;
  }

  absl::Status Exchange(int32_t rank, Part& part, uint32_t operation, int64_t order,
                        const Buffer& send, const Buffer& receive) {
    AllToAllVParams params;
    params.tag.step = 1 + (order < 0 ? 0 : order % 2);
    params.tag.operation = operation;
    params.tag.order = order;
    params.send = send.data();
    params.send_bytes = part.counts;
    params.receive = receive.data();
    params.receive_bytes = part.counts;
    return ranks_[rank]->AllToAllV(params, *part.stream);
  }

  // From the host to the device, to the peers, and what has come back to the host.
  void PostOneWay(int32_t rank, Part& part) {
    const int64_t size_bytes = part.host.size_bytes();
    ASSERT_TRUE(part.stream->Copy(part.send.data(), part.host.data(), size_bytes).ok());
    ASSERT_TRUE(Exchange(rank, part, 0, -1, part.send, part.receive).ok());
    ASSERT_TRUE(part.stream->Copy(part.host.data(), part.receive.data(), size_bytes).ok());
    PostEnd(part);
  }
  // What a rank does with rows of its peers is to send them back.
  void PostThereAndBack(int32_t rank, Part& part, int64_t dispatch_order, int64_t combine_order) {
    const int64_t size_bytes = part.host.size_bytes();
    ASSERT_TRUE(part.stream->Copy(part.send.data(), part.host.data(), size_bytes).ok());
    ASSERT_TRUE(Exchange(rank, part, 0, dispatch_order, part.send, part.receive).ok());
    ranks_[rank]->CloseOrder(dispatch_order);
    ASSERT_TRUE(part.stream->Copy(part.send.data(), part.receive.data(), size_bytes).ok());
    ASSERT_TRUE(Exchange(rank, part, 1, combine_order, part.send, part.returned).ok());
    ranks_[rank]->CloseOrder(combine_order);
    ASSERT_TRUE(part.stream->Copy(part.host.data(), part.returned.data(), size_bytes).ok());
    PostEnd(part);
  }
  void PostEnd(Part& part) {
    ASSERT_TRUE(part.stream
                    ->Launch([launched = part.launched](cudaStream_t) mutable {
                      launched.Signal();
                      return absl::OkStatus();
                    })
                    .ok());
    ASSERT_TRUE(part.stream->Record(part.done).ok());
  }
  void PostHostWork(Part& part) {
    ASSERT_TRUE(part.stream
                    ->Enqueue([&part] {
                      part.host_worked = true;
                      return absl::OkStatus();
                    })
                    .ok());
  }

  FakeNccl::Faults Hang() {
    FakeNccl::Faults faults;
    faults.operations_hang = true;
    return faults;
  }

  struct Allocators {
    CudaAllocator device{CudaMemory::kDevice, 0};
    CudaAllocator pinned{CudaMemory::kPinnedHost, 0};
  };
  std::unique_ptr<Allocators> allocators_;
  std::shared_ptr<FakeNcclOnCuda> nccl_;
  std::vector<std::unique_ptr<Communicator>> ranks_;
  std::vector<std::unique_ptr<Part>> parts_;
};

// Two lanes, whose transfers NCCL's stream gets by place whoever calls first. All of both steps is
// on the device before that does anything.
TEST_F(NcclDeviceOrderTest, WholeStepsOfTwoLanesAreLaunchedAtOnce) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Start(2, seed);
    HangEmulatedDevice(true);
    for (int32_t rank = 0; rank < 2; ++rank) {
      for (int32_t i = 0; i < 2; ++i) {
        const int32_t lane = (rank + i) % 2;
        PostThereAndBack(rank, NewPart(rank, lane), lane, 2 + lane);
        ASSERT_FALSE(HasFailure());
      }
    }
    for (const auto& part : parts_) ASSERT_TRUE(part->launched.Wait(Soon()).ok());
    for (const auto& part : parts_) EXPECT_FALSE(part->done.done());
    HangEmulatedDevice(false);
    for (size_t i = 0; i < parts_.size(); ++i) {
      Part& part = *parts_[i];
      const absl::Status status = part.stream->Wait(Soon());
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_TRUE(part.done.Wait(Soon()).ok());
      const auto rank = static_cast<int32_t>(i / 2);
      const auto lane = static_cast<int32_t>((rank + i) % 2);
      for (int32_t peer = 0; peer < 2; ++peer) {
        for (const int64_t at : {int64_t{0}, kBlock - 1}) {
          EXPECT_EQ(static_cast<char>(part.host.data()[peer * kBlock + at]),
                    Byte(rank, peer, lane));
        }
      }
    }
    parts_.clear();
    ranks_.clear();
    EXPECT_EQ(nccl_->nccl().misuses(), "");
  }
}

// A rank to or from which nothing moves does not wait for the host either.
TEST_F(NcclDeviceOrderTest, NothingToMoveHoldsUpNothing) {
  Start(1);
  Part& part = NewPart(0, 0);
  part.counts = {0};
  HangEmulatedDevice(true);
  PostOneWay(0, part);
  ASSERT_TRUE(part.launched.Wait(Soon()).ok());
  EXPECT_FALSE(part.done.done());
  HangEmulatedDevice(false);
  EXPECT_TRUE(part.stream->Wait(Soon()).ok());
}

TEST_F(NcclDeviceOrderTest, AnAbortAfterTheLaunchFailsWhatTheDeviceHasDone) {
  for (const bool wait_first : {true, false}) {
    SCOPED_TRACE(wait_first);
    Start(2);
    for (const int32_t rank : {0, 1}) nccl_->nccl().SetFaults(rank, Hang());
    for (int32_t rank = 0; rank < 2; ++rank) {
      Part& part = NewPart(rank, 0);
      PostOneWay(rank, part);
      PostHostWork(part);
    }
    for (const auto& part : parts_) ASSERT_TRUE(part->launched.Wait(Soon()).ok());
    EXPECT_EQ(parts_[0]->stream->Wait(absl::Now() + absl::Milliseconds(5)).code(),
              absl::StatusCode::kDeadlineExceeded);
    std::thread aborter([&] { ranks_[0]->Abort(absl::InternalError("why")); });
    if (wait_first) {
      for (const auto& part : parts_) {
        const absl::Status status = part->stream->Wait(Soon());
        EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
      }
      aborter.join();
    } else {
      // As a step that is given up: first the abort, then the streams, and then the memory.
      aborter.join();
      ranks_[1]->Abort(absl::InternalError("why"));
      for (const auto& part : parts_) part->stream.reset();
    }
    for (int32_t rank = 0; rank < 2; ++rank) {
      const Part& part = *parts_[rank];
      EXPECT_FALSE(part.done.Wait(Soon()).ok());
      EXPECT_FALSE(part.host_worked);
      EXPECT_NE(static_cast<char>(part.host.data()[(1 - rank) * kBlock]), Byte(rank, 1 - rank, 0))
          << "the device ran on: the copy behind the transfer was made";
    }
    parts_.clear();
    ranks_.clear();
  }
}

// A stream that goes while its transfer hangs waits for the abort, whoever calls that.
TEST_F(NcclDeviceOrderTest, AStreamIsDestroyedWhileItsTransferHangs) {
  Start(1);
  nccl_->nccl().SetFaults(0, Hang());
  Part& part = NewPart(0, 0);
  PostOneWay(0, part);
  ASSERT_TRUE(part.launched.Wait(Soon()).ok());
  Event destroyed;
  std::thread destroyer([&part, destroyed]() mutable {
    part.stream.reset();
    destroyed.Signal();
  });
  EXPECT_EQ(destroyed.Wait(absl::Now() + absl::Milliseconds(20)).code(),
            absl::StatusCode::kDeadlineExceeded);
  ranks_[0]->Abort(absl::InternalError("why"));
  EXPECT_TRUE(destroyed.Wait(Soon()).ok());
  destroyer.join();
  EXPECT_FALSE(part.done.Wait(Soon()).ok());
}

TEST_F(NcclDeviceOrderTest, APeersErrorFailsWhatWasLaunched) {
  Start(3);
  for (const int32_t rank : {0, 1, 2}) nccl_->nccl().SetFaults(rank, Hang());
  for (int32_t rank = 0; rank < 3; ++rank) PostOneWay(rank, NewPart(rank, 0));
  for (const auto& part : parts_) ASSERT_TRUE(part->launched.Wait(Soon()).ok());
  FakeNccl::Faults faults = Hang();
  faults.async_error = NcclFunctions::Result::kRemoteError;
  nccl_->nccl().SetFaults(1, faults);
  for (size_t rank = 0; rank < 3; ++rank) {
    const absl::Status status = parts_[rank]->stream->Wait(Soon());
    EXPECT_EQ(status.code(),
              rank == 1 ? absl::StatusCode::kUnavailable : absl::StatusCode::kAborted)
        << status;
    EXPECT_EQ(parts_[rank]->done.Wait(Soon()), status);
  }
}

// The second transfer is with NCCL, too, and what follows it launched, when the first one fails.
TEST_F(NcclDeviceOrderTest, ALaterTransferFailsWithTheOneBefore) {
  Start(2);
  for (const int32_t rank : {0, 1}) nccl_->nccl().SetFaults(rank, Hang());
  for (int32_t rank = 0; rank < 2; ++rank) PostThereAndBack(rank, NewPart(rank, 0), 0, 1);
  for (const auto& part : parts_) ASSERT_TRUE(part->launched.Wait(Soon()).ok());
  ranks_[1]->Abort(absl::InternalError("why"));
  for (const auto& part : parts_) {
    EXPECT_EQ(part->stream->Wait(Soon()).code(), absl::StatusCode::kAborted);
    EXPECT_EQ(part->done.Wait(Soon()).code(), absl::StatusCode::kAborted);
  }
}

}  // namespace
}  // namespace expertmesh
