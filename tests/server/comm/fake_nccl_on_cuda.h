#ifndef EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_ON_CUDA_H_
#define EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_ON_CUDA_H_

#include "server/comm/nccl_device_functions.h"
#include "tests/server/comm/fake_nccl.h"

namespace expertmesh {

// FakeNccl whose streams, events and memory are those of the emulated CUDA runtime: its kernels run
// in a cudaStream_t's order and may touch device memory, and nothing else moves it on than what
// asks the runtime.
class FakeNcclOnCuda : public NcclDeviceFunctions {
 public:
  FakeNcclOnCuda();

  FakeNccl& nccl() { return nccl_; }

  std::string Describe() const override { return nccl_.Describe(); }
  std::string ErrorText(Result result, Comm comm) override { return nccl_.ErrorText(result, comm); }
  Result GetUniqueId(UniqueId* id) override { return nccl_.GetUniqueId(id); }
  Result CommInitRank(Comm* comm, int32_t num_ranks, const UniqueId& id, int32_t rank) override {
    return nccl_.CommInitRank(comm, num_ranks, id, rank);
  }
  Result CommGetAsyncError(Comm comm, Result* error) override {
    return nccl_.CommGetAsyncError(comm, error);
  }
  Result CommFinalize(Comm comm) override { return nccl_.CommFinalize(comm); }
  Result CommDestroy(Comm comm) override { return nccl_.CommDestroy(comm); }
  Result CommAbort(Comm comm) override { return nccl_.CommAbort(comm); }
  Result GroupStart() override { return nccl_.GroupStart(); }
  Result GroupEnd() override { return nccl_.GroupEnd(); }
  Result Send(const void* data, int64_t num_bytes, int32_t peer, Comm comm,
              DeviceStream stream) override {
    return nccl_.Send(data, num_bytes, peer, comm, stream);
  }
  Result Recv(void* data, int64_t num_bytes, int32_t peer, Comm comm,
              DeviceStream stream) override {
    return nccl_.Recv(data, num_bytes, peer, comm, stream);
  }
  Result AllGather(const void* send, void* receive, int64_t num_bytes, Comm comm,
                   DeviceStream stream) override {
    return nccl_.AllGather(send, receive, num_bytes, comm, stream);
  }
  bool has_all_to_all() const override { return nccl_.has_all_to_all(); }
  Result AllToAll(const void* send, void* receive, int64_t num_bytes, Comm comm,
                  DeviceStream stream) override {
    return nccl_.AllToAll(send, receive, num_bytes, comm, stream);
  }

 private:
  FakeNccl nccl_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_ON_CUDA_H_
