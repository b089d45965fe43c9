// The real NCCL on the real device, with the one rank that one GPU allows: what a rank sends itself
// goes through NCCL's kernels, too. NCCL_LIBRARY names the library's file, if the loader finds
// none.

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_allocator.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cuda_stream.h"
#include "server/comm/in_memory_rendezvous_store.h"
#include "server/comm/in_process_communicator.h"
#include "server/comm/nccl_communicator.h"
#include "server/comm/nccl_library.h"

namespace expertmesh {
namespace {

class NcclGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const absl::Status status = CheckCudaDevice(0); !status.ok()) {
      std::cout << status.message() << "\n";
      GTEST_SKIP() << status;
    }
    const char* const path = std::getenv("NCCL_LIBRARY");
    absl::StatusOr<std::shared_ptr<NcclFunctions>> nccl =
        OpenNcclLibrary(path == nullptr ? "" : path);
    ASSERT_TRUE(nccl.ok()) << nccl.status();
    std::cout << (*nccl)->Describe() << "\n";
    NcclCommunicatorParams params;
    params.functions = *std::move(nccl);
    params.control = std::move(NewInProcessCommunicators(1).front());
    params.store = &store_;
    params.deadline = absl::Now() + absl::Seconds(60);
    params.on_stuck_abort = [](const absl::Status& status) { ADD_FAILURE() << status; };
    absl::StatusOr<std::unique_ptr<Communicator>> made = NewNcclCommunicator(std::move(params));
    ASSERT_TRUE(made.ok()) << made.status();
    communicator_ = *std::move(made);
  }

  static absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

  // What is sent, received and copied back.
  void Exchange(int64_t num_bytes, uint64_t step, bool gather) {
    std::vector<char> bytes(num_bytes);
    for (int64_t i = 0; i < num_bytes; ++i) bytes[i] = static_cast<char>(i * 31 + step);
    std::vector<char> back(num_bytes);
    const Buffer send = allocator_.Allocate(num_bytes).value();
    const Buffer receive = allocator_.Allocate(num_bytes).value();
    const std::unique_ptr<CudaStream> stream = pool_.NewStream();
    const std::vector<int64_t> counts = {num_bytes};
    ASSERT_TRUE(stream->Copy(send.data(), bytes.data(), num_bytes).ok());
    absl::Status status;
    if (gather) {
      AllGatherVParams params;
      params.tag.step = step;
      params.send = send.data();
      params.receive = receive.data();
      params.receive_bytes = counts;
      status = communicator_->AllGatherV(params, *stream);
    } else {
      AllToAllVParams params;
      params.tag.step = step;
      params.send = send.data();
      params.send_bytes = counts;
      params.receive = receive.data();
      params.receive_bytes = counts;
      status = communicator_->AllToAllV(params, *stream);
    }
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(stream->Copy(back.data(), receive.data(), num_bytes).ok());
    status = stream->Wait(Soon());
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(back, bytes);
  }

  InMemoryRendezvousStore store_;
  CudaAllocator allocator_{CudaMemory::kDevice, 0};
  CudaStreamPool pool_{0};
  std::unique_ptr<Communicator> communicator_;
};

TEST_F(NcclGpuTest, MovesARanksOwnRows) {
  uint64_t step = 0;
  for (const int64_t num_bytes : {1, 15, 4096, 100001, 32 << 20}) {
    for (const bool gather : {false, true}) {
      SCOPED_TRACE(num_bytes);
      Exchange(num_bytes, ++step, gather);
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST_F(NcclGpuTest, BarrierAndNothingToSend) {
  Exchange(0, 1, false);
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  CollectiveTag tag;
  tag.step = 2;
  ASSERT_TRUE(communicator_->Barrier(tag, *stream).ok());
  EXPECT_TRUE(stream->Wait(Soon()).ok());
}

TEST_F(NcclGpuTest, AbortReturns) {
  Exchange(1000, 1, false);
  communicator_->Abort(absl::InternalError("why"));
  const std::unique_ptr<CudaStream> stream = pool_.NewStream();
  EXPECT_EQ(communicator_->Barrier({}, *stream).code(), absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace expertmesh
