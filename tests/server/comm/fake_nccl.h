#ifndef EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_H_
#define EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "server/comm/nccl_functions.h"

namespace expertmesh {

// NCCL and the little of CUDA that NcclFunctions has, in memory: all ranks of a group are in this
// process and share one object. Device memory is host memory; a stream has a thread that runs what
// it was given in order.
//
// As the real ones: sends and receives match by pair of ranks and by order; a group moves on as
// one, its parts side by side; sizes or kinds that do not match hang until an abort; so does a peer
// that does not come; non-blocking calls answer kInProgress, and what they enqueue is on the stream
// only when CommGetAsyncError answers kSuccess; an abort ends what runs and frees the communicator.
//
// What real code would crash or hang on is told by misuses(): calls of a communicator that is gone,
// groups on one that is in progress, sends outside a group or of nothing.
class FakeNccl : public NcclFunctions {
 public:
  struct Faults {
    Result get_unique_id = Result::kSuccess;
    Result init = Result::kSuccess;  // of CommInitRank, or with init_late of its outcome
    bool init_late = false;
    bool init_never_ends = false;
    Result group_end = Result::kSuccess;  // of GroupEnd
    bool operations_hang = false;         // they are never over on the device
    bool enqueue_never_ends = false;      // GroupEnd stays in progress
    Result async_error = Result::kSuccess;
    bool call_hangs = false;           // GroupEnd does not return before the abort
    bool call_survives_abort = false;  // nor then, until ReleaseAborts
    bool abort_hangs = false;          // until ReleaseAborts
    bool finalize_never_ends = false;
  };

  // A kernel on a stream of somebody else's: `begin`, then, once `is_over` says so, `end`.
  using LaunchKernel =
      std::function<void(DeviceStream stream, std::function<void()> begin,
                         std::function<bool()> is_over, std::function<void()> end)>;

  // With `launch_kernel` streams are its: those of this object must not be used, and an abort
  // leaves it to the caller to wait for them.
  explicit FakeNccl(bool has_all_to_all = true, LaunchKernel launch_kernel = nullptr);
  ~FakeNccl() override;

  // From now on, for this rank of every group.
  void SetFaults(int32_t rank, const Faults& faults);
  // Ends hung aborts and calls; returns when all aborts have ended.
  void ReleaseAborts();
  // EventQuery does not return before an abort.
  void HangQueries();

  std::string misuses() const;
  int64_t num_live_comms() const;
  int64_t num_live_streams() const;
  int64_t num_live_events() const;
  int64_t num_aborts() const;
  int64_t num_all_to_alls() const;
  int64_t num_all_gathers() const;
  int64_t num_sends() const;
  int64_t num_taken() const;  // groups that are no longer in progress

  // Callers' host streams are taken for the device's.
  void TreatCallersAsDeviceStreams();
  int64_t num_native_records() const;

  std::string Describe() const override { return "fake NCCL"; }
  std::string ErrorText(Result result, Comm comm) override;
  Result GetUniqueId(UniqueId* id) override;
  Result CommInitRank(Comm* comm, int32_t num_ranks, const UniqueId& id, int32_t rank) override;
  Result CommGetAsyncError(Comm comm, Result* error) override;
  Result CommFinalize(Comm comm) override;
  Result CommDestroy(Comm comm) override;
  Result CommAbort(Comm comm) override;
  Result GroupStart() override;
  Result GroupEnd() override;
  Result Send(const void* data, int64_t num_bytes, int32_t peer, Comm comm,
              DeviceStream stream) override;
  Result Recv(void* data, int64_t num_bytes, int32_t peer, Comm comm, DeviceStream stream) override;
  Result AllGather(const void* send, void* receive, int64_t num_bytes, Comm comm,
                   DeviceStream stream) override;
  bool has_all_to_all() const override { return has_all_to_all_; }
  Result AllToAll(const void* send, void* receive, int64_t num_bytes, Comm comm,
                  DeviceStream stream) override;
  absl::Status SetDevice(int32_t device_index) override;
  absl::Status StreamCreate(DeviceStream* stream) override;
  void StreamDestroy(DeviceStream stream) override;
  absl::Status StreamSynchronize(DeviceStream stream) override;
  absl::Status StreamWaitEvent(DeviceStream stream, DeviceEvent event) override;
  absl::Status EventCreate(DeviceEvent* event) override;
  void EventDestroy(DeviceEvent event) override;
  absl::Status EventRecord(DeviceEvent event, DeviceStream stream) override;
  absl::StatusOr<bool> EventQuery(DeviceEvent event) override;
  bool IsDeviceStream(const Stream& stream) const override;
  absl::Status RecordOnCaller(Stream& stream, DeviceEvent event, const Event& recorded,
                              std::shared_ptr<const void> event_owner) override;
  // Host streams wait for the host.
  std::shared_ptr<const DevicePoint> MakePoint(
      int32_t /*device_index*/, const std::shared_ptr<void>& /*event*/) const override {
    return nullptr;
  }

 private:
  struct State;
  const bool has_all_to_all_;
  const std::unique_ptr<State> state_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_H_
