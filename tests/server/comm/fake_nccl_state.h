#ifndef EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_STATE_H_
#define EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_STATE_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/comm/fake_nccl.h"
#include "tests/server/comm/fake_nccl_device.h"
#include "tests/server/comm/fake_nccl_transfers.h"

namespace expertmesh {

// How often CommGetAsyncError says that a call is in progress before it is over.
constexpr int kPollsInProgress = 2;

// Whoever is in a call of it, and what its stream has still to do, keeps it.
struct FakeComm : std::enable_shared_from_this<FakeComm> {
  int32_t rank = 0;
  int32_t num_ranks = 1;
  std::string group;
  int polls_left = kPollsInProgress;
  bool initialized = false;
  bool finalizing = false;
  bool aborted = false;
  int num_kernels = 0;            // that run
  std::function<void()> enqueue;  // when the call in progress is over
};

// Calls of one thread from GroupStart to GroupEnd.
struct FakeNcclCalls {
  using Part = FakeNcclTransfers::Part;

  void AddForAllPeers(FakeNcclTransfers::Kind kind, const void* send, int64_t send_stride,
                      void* receive, int64_t num_bytes) {
    for (int32_t peer = 0; peer < comm->num_ranks; ++peer) {
      parts.push_back(Part::Send(kind, static_cast<const std::byte*>(send) + peer * send_stride,
                                 num_bytes, peer));
      parts.push_back(Part::Receive(kind, static_cast<std::byte*>(receive) + peer * num_bytes,
                                    num_bytes, peer));
    }
  }

  FakeComm* comm = nullptr;
  NcclFunctions::DeviceStream stream = nullptr;
  std::vector<Part> parts;
  int depth = 0;
};
// What the ranks share: communicators, what is on its way between them, and what was done wrong.
// The mutex guards all that is not const, but for the device.
struct FakeNccl::State {
  using Lock = std::unique_lock<std::mutex>;
  const LaunchKernel launch_kernel;
  FakeNcclDevice device;

  explicit State(LaunchKernel launch) : launch_kernel(std::move(launch)) {}

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::map<int32_t, Faults> faults;
  std::map<FakeComm*, std::shared_ptr<FakeComm>> comms;
  std::map<std::string, std::set<int32_t>> joined;  // ranks, by group
  FakeNcclTransfers transfers;
  std::string misuses;
  int64_t num_ids = 0;
  int64_t num_aborts = 0;
  int64_t num_hung_aborts = 0;
  bool aborts_released = false;
  bool queries_hang = false;
  int64_t num_all_to_alls = 0;
  int64_t num_all_gathers = 0;
  int64_t num_sends = 0;
  int64_t num_taken = 0;
  bool native_callers = false;

  int64_t Read(int64_t State::*counter) const {
    const Lock lock(mutex);
    return this->*counter;
  }

  void Misuse(const std::string& what) { absl::StrAppend(&misuses, what, "; "); }

  // Null, and a misuse, for one that is gone.
  FakeComm* Find(Comm comm, const char* call) {
    const auto found = comms.find(static_cast<FakeComm*>(comm));
    if (found != comms.end() && !found->first->aborted) return found->first;
    Misuse(absl::StrCat(call, " of a communicator that is gone"));
    return nullptr;
  }

  // What a group does on the device, in three steps of its stream.
  struct Kernel {
    std::shared_ptr<FakeComm> comm;
    std::vector<FakeNcclTransfers::Part> parts;
    bool begun = false;
  };
  void Begin(Kernel& kernel) {
    const Lock lock(mutex);
    if (kernel.comm->aborted) return;
    kernel.begun = true;
    ++kernel.comm->num_kernels;
    transfers.Post(kernel.comm->group, kernel.comm->rank, kernel.parts);
    changed.notify_all();
  }
  bool IsOverLocked(const Kernel& kernel) {
    if (!kernel.begun || kernel.comm->aborted) return true;
    bool all_over = !faults[kernel.comm->rank].operations_hang;
    for (const FakeNcclTransfers::Part& part : kernel.parts) all_over = all_over && part.over;
    return all_over;
  }
  bool IsOver(const Kernel& kernel) {
    const Lock lock(mutex);
    return IsOverLocked(kernel);
  }
  void WaitUntilOver(const Kernel& kernel) {
    Lock lock(mutex);
    changed.wait(lock, [&] { return IsOverLocked(kernel); });
  }
  void End(Kernel& kernel) {
    const Lock lock(mutex);
    if (!kernel.begun) return;
    transfers.Withdraw(kernel.comm->group, kernel.comm->rank, kernel.parts);
    --kernel.comm->num_kernels;
    changed.notify_all();
  }

  Result Enqueue(const FakeNcclCalls& group) {
    Lock lock(mutex);
    if (group.comm == nullptr) return Result::kSuccess;
    const std::shared_ptr<FakeComm> comm = group.comm->shared_from_this();
    if (comm->enqueue != nullptr || comm->polls_left > 0) {
      Misuse("a group on a communicator that is in progress");
      return Result::kInvalidUsage;
    }
    const Faults& fault = faults[comm->rank];
    if (fault.group_end != Result::kSuccess) return fault.group_end;
    if (fault.call_hangs) {
      const bool survives = fault.call_survives_abort;
      changed.wait(lock, [&] { return aborts_released || (comm->aborted && !survives); });
      return Result::kInternalError;
    }
    comm->polls_left = kPollsInProgress;
    comm->enqueue = [this, group] {
      const auto kernel =
          std::make_shared<Kernel>(Kernel{group.comm->shared_from_this(), group.parts});
      if (launch_kernel != nullptr) {
        launch_kernel(
            group.stream, [this, kernel] { Begin(*kernel); },
            [this, kernel] { return IsOver(*kernel); }, [this, kernel] { End(*kernel); });
        return;
      }
      device.Push(group.stream, [this, kernel] {
        Begin(*kernel);
        WaitUntilOver(*kernel);
        End(*kernel);
      });
    };
    return Result::kInProgress;
  }
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_STATE_H_
