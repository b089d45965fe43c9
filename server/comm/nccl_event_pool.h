#ifndef EXPERTMESH_SERVER_COMM_NCCL_EVENT_POOL_H_
#define EXPERTMESH_SERVER_COMM_NCCL_EVENT_POOL_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "server/comm/nccl_functions.h"

namespace expertmesh {

// Events of one device, used again and again. Thread safe; events may outlive it.
class NcclEventPool : public std::enable_shared_from_this<NcclEventPool> {
 public:
  // A DeviceEvent, which goes back to the pool with its last reference.
  using SharedEvent = std::shared_ptr<void>;

  NcclEventPool(std::shared_ptr<NcclFunctions> functions, int32_t device_index);
  ~NcclEventPool();
  NcclEventPool(const NcclEventPool&) = delete;
  NcclEventPool& operator=(const NcclEventPool&) = delete;

  // Makes the device current on the calling thread when it has none left.
  absl::StatusOr<SharedEvent> Take();
  // The device may get to its events at any later time, so they are never destroyed.
  void Abandon();

 private:
  const std::shared_ptr<NcclFunctions> functions_;
  const int32_t device_index_;
  std::mutex mutex_;  // guards what follows
  std::vector<NcclFunctions::DeviceEvent> idle_;
  bool abandoned_ = false;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_COMM_NCCL_EVENT_POOL_H_
