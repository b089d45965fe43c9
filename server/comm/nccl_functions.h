#ifndef EXPERTMESH_SERVER_COMM_NCCL_FUNCTIONS_H_
#define EXPERTMESH_SERVER_COMM_NCCL_FUNCTIONS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/stream.h"

namespace expertmesh {

// Multiprocessors that an exchange takes at most (ncclConfig_t::maxCTAs: blocks of its kernels),
// and that products of experts leave free for it (CudaDeviceOptions): so one lane's rows travel
// while another one's experts compute. More blocks move more bytes at once; that these are enough
// for NVLink, and not too many to be missed by products, is to be measured.
inline constexpr int32_t kNcclMultiprocessors = 8;

// What of NCCL and of CUDA's runtime NcclCommunicator calls: everything, so that tests can put a
// fake in its place and no other file needs their headers. nccl_library.h opens the real one.
//
// Names and meanings are NCCL's and CUDA's. Thread safe as those are: one thread at a time for a
// communicator, but for CommAbort; GroupStart and GroupEnd hold for the calling thread.
class NcclFunctions {
 public:
  using UniqueId = std::array<char, 128>;
  using Comm = void*;
  using DeviceStream = void*;
  using DeviceEvent = void*;

  // ncclResult_t's numbers; a library may return others.
  enum class Result : int32_t {
    kSuccess = 0,
    kUnhandledCudaError = 1,
    kSystemError = 2,
    kInternalError = 3,
    kInvalidArgument = 4,
    kInvalidUsage = 5,
    kRemoteError = 6,
    kInProgress = 7,  // of non-blocking communicators: ask CommGetAsyncError until it is another
  };

  virtual ~NcclFunctions() = default;

  // For people: the library's version, and where it was found.
  virtual std::string Describe() const = 0;
  // What the library says of a result, its last warning included. `comm` may be null.
  virtual std::string ErrorText(Result result, Comm comm) = 0;

  virtual Result GetUniqueId(UniqueId* id) = 0;
  // ncclCommInitRankConfig with blocking = 0.
  virtual Result CommInitRank(Comm* comm, int32_t num_ranks, const UniqueId& id, int32_t rank) = 0;
  virtual Result CommGetAsyncError(Comm comm, Result* error) = 0;
  virtual Result CommFinalize(Comm comm) = 0;
  virtual Result CommDestroy(Comm comm) = 0;
  virtual Result CommAbort(Comm comm) = 0;
  virtual Result GroupStart() = 0;
  virtual Result GroupEnd() = 0;
  // Device memory, of bytes.
  virtual Result Send(const void* data, int64_t num_bytes, int32_t peer, Comm comm,
                      DeviceStream stream) = 0;
  virtual Result Recv(void* data, int64_t num_bytes, int32_t peer, Comm comm,
                      DeviceStream stream) = 0;
  virtual Result AllGather(const void* send, void* receive, int64_t num_bytes, Comm comm,
                           DeviceStream stream) = 0;
  // NCCL from 2.28 on has it.
  virtual bool has_all_to_all() const = 0;
  // num_bytes to and from each rank.
  virtual Result AllToAll(const void* send, void* receive, int64_t num_bytes, Comm comm,
                          DeviceStream stream) = 0;

  // On the calling thread, which makes the other calls of this device.
  virtual absl::Status SetDevice(int32_t device_index) = 0;
  // Of the highest priority: an exchange takes few of the device's processors, and must get them
  // while another step's experts, who would take all, compute.
  virtual absl::Status StreamCreate(DeviceStream* stream) = 0;
  virtual void StreamDestroy(DeviceStream stream) = 0;
  // Blocks.
  virtual absl::Status StreamSynchronize(DeviceStream stream) = 0;
  virtual absl::Status StreamWaitEvent(DeviceStream stream, DeviceEvent event) = 0;
  virtual absl::Status EventCreate(DeviceEvent* event) = 0;
  virtual void EventDestroy(DeviceEvent event) = 0;
  virtual absl::Status EventRecord(DeviceEvent event, DeviceStream stream) = 0;
  // False: not ready.
  virtual absl::StatusOr<bool> EventQuery(DeviceEvent event) = 0;

  // A stream of the device, whose order the next function can mark.
  virtual bool IsDeviceStream(const Stream& stream) const = 0;
  // Records `event` in `stream`'s order without a round trip to the host, and signals `recorded`
  // once that is enqueued on the device: never when the stream has an error. `event_owner` lives as
  // long as the stream may still record the event.
  virtual absl::Status RecordOnCaller(Stream& stream, DeviceEvent event, const Event& recorded,
                                      std::shared_ptr<const void> event_owner) = 0;
  // `event`, which is recorded, for Event::Place: callers' streams wait for it on the device, and
  // hold the reference meanwhile. Null: they wait for the host.
  virtual std::shared_ptr<const DevicePoint> MakePoint(
      int32_t device_index, const std::shared_ptr<void>& event) const = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_NCCL_FUNCTIONS_H_
