#ifndef EXPERTMESH_SERVER_COMM_NCCL_DEVICE_FUNCTIONS_H_
#define EXPERTMESH_SERVER_COMM_NCCL_DEVICE_FUNCTIONS_H_

#include <memory>

#include "server/comm/nccl_functions.h"

namespace expertmesh {

// The device's part of NcclFunctions, by CUDA's runtime: DeviceStream is a cudaStream_t,
// DeviceEvent a cudaEvent_t, and a CudaStream is a device stream.
class NcclDeviceFunctions : public NcclFunctions {
 public:
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
  std::shared_ptr<const DevicePoint> MakePoint(int32_t device_index,
                                               const std::shared_ptr<void>& event) const override;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_NCCL_DEVICE_FUNCTIONS_H_
