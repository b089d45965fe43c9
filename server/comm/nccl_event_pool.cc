#include "server/comm/nccl_event_pool.h"

#include <utility>

namespace expertmesh {

NcclEventPool::NcclEventPool(std::shared_ptr<NcclFunctions> functions, int32_t device_index)
    : functions_(std::move(functions)), device_index_(device_index) {}

NcclEventPool::~NcclEventPool() {
  if (abandoned_) return;
  for (const NcclFunctions::DeviceEvent event : idle_) functions_->EventDestroy(event);
}

absl::StatusOr<NcclEventPool::SharedEvent> NcclEventPool::Take() {
  NcclFunctions::DeviceEvent event = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      event = idle_.back();
      idle_.pop_back();
    }
  }
  if (event == nullptr) {
    absl::Status status = functions_->SetDevice(device_index_);
    if (status.ok()) status = functions_->EventCreate(&event);
    if (!status.ok()) return status;
  }
  return SharedEvent(event, [pool = shared_from_this()](NcclFunctions::DeviceEvent returned) {
    const std::lock_guard<std::mutex> lock(pool->mutex_);
    pool->idle_.push_back(returned);
  });
}

void NcclEventPool::Abandon() {
  const std::lock_guard<std::mutex> lock(mutex_);
  abandoned_ = true;
}

}  // namespace expertmesh
