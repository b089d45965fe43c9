#include "server/comm/nccl_event_pool.h"

namespace expertmesh {

std::shared_ptr<NcclEventPool> NewNcclEventPool(std::shared_ptr<NcclFunctions> functions,
                                                int32_t device_index) {
  return std::make_shared<NcclEventPool>(
      [functions, device_index]() -> absl::StatusOr<NcclFunctions::DeviceEvent> {
        NcclFunctions::DeviceEvent event = nullptr;
        absl::Status status = functions->SetDevice(device_index);
        if (status.ok()) status = functions->EventCreate(&event);
        if (!status.ok()) return status;
        return event;
      },
      [functions](NcclFunctions::DeviceEvent event) { functions->EventDestroy(event); });
}

}  // namespace expertmesh
