#ifndef EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_DEVICE_H_
#define EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_DEVICE_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

#include "kernels/base/stream.h"
#include "server/comm/nccl_functions.h"

namespace expertmesh {

// The little of CUDA that NcclFunctions has, in memory: a stream is a thread that runs what it was
// given in order, device memory is host memory. Thread safe.
class FakeNcclDevice {
 public:
  using DeviceStream = NcclFunctions::DeviceStream;
  using DeviceEvent = NcclFunctions::DeviceEvent;

  // What was left behind is destroyed.
  ~FakeNcclDevice();

  DeviceStream CreateStream();
  void DestroyStream(DeviceStream stream);  // after all its work
  void DestroyStreams();
  void Push(DeviceStream stream, std::function<void()> work);
  void Synchronize(DeviceStream stream);
  int64_t num_live_streams() const;

  DeviceEvent CreateEvent();
  void DestroyEvent(DeviceEvent event);
  void Record(DeviceEvent event, DeviceStream stream);
  void WaitFor(DeviceStream stream, DeviceEvent event);
  bool IsReached(DeviceEvent event) const;
  int64_t num_live_events() const;

  // On a stream of the host, which is taken for one of the device: the event is recorded and
  // reached when that has come so far; in between, `recorded` is signalled.
  absl::Status RecordOnHost(Stream& stream, DeviceEvent event, const Event& recorded,
                            std::shared_ptr<const void> event_owner);
  int64_t num_records_on_host() const;

 private:
  struct FakeStream;
  struct FakeEvent;
  using Lock = std::unique_lock<std::mutex>;

  void RunStream(FakeStream& stream);
  void Reach(FakeEvent& event, int64_t number);

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::set<FakeStream*> streams_;
  std::set<FakeEvent*> events_;
  int64_t num_records_on_host_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_SERVER_COMM_FAKE_NCCL_DEVICE_H_
