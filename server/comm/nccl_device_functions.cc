#include "server/comm/nccl_device_functions.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "kernels/cuda/cuda_device_point.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cuda_stream.h"

namespace expertmesh {
namespace {

cudaStream_t AsStream(NcclFunctions::DeviceStream stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t AsEvent(NcclFunctions::DeviceEvent event) { return static_cast<cudaEvent_t>(event); }

// Of the calling thread.
absl::Status Checked(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  int device_index = -1;
  static_cast<void>(cudaGetDevice(&device_index));
  return CudaStatus(error, call, device_index);
}

}  // namespace

absl::Status NcclDeviceFunctions::SetDevice(int32_t device_index) {
  return UseCudaDevice(device_index);
}

absl::Status NcclDeviceFunctions::StreamCreate(DeviceStream* stream) {
  int least = 0;
  int greatest = 0;
  absl::Status status = Checked(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                                "cudaDeviceGetStreamPriorityRange");
  if (!status.ok()) return status;
  cudaStream_t made = nullptr;
  status = Checked(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest),
                   "cudaStreamCreateWithPriority");
  *stream = made;
  return status;
}

// Nobody is left to tell of an error.
void NcclDeviceFunctions::StreamDestroy(DeviceStream stream) {
  static_cast<void>(cudaStreamDestroy(AsStream(stream)));
}

absl::Status NcclDeviceFunctions::StreamSynchronize(DeviceStream stream) {
  return Checked(cudaStreamSynchronize(AsStream(stream)), "cudaStreamSynchronize");
}

absl::Status NcclDeviceFunctions::StreamWaitEvent(DeviceStream stream, DeviceEvent event) {
  return Checked(cudaStreamWaitEvent(AsStream(stream), AsEvent(event), 0), "cudaStreamWaitEvent");
}

absl::Status NcclDeviceFunctions::EventCreate(DeviceEvent* event) {
  cudaEvent_t made = nullptr;
  absl::Status status =
      Checked(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  *event = made;
  return status;
}

void NcclDeviceFunctions::EventDestroy(DeviceEvent event) {
  static_cast<void>(cudaEventDestroy(AsEvent(event)));
}

absl::Status NcclDeviceFunctions::EventRecord(DeviceEvent event, DeviceStream stream) {
  return Checked(cudaEventRecord(AsEvent(event), AsStream(stream)), "cudaEventRecord");
}

absl::StatusOr<bool> NcclDeviceFunctions::EventQuery(DeviceEvent event) {
  const cudaError_t error = cudaEventQuery(AsEvent(event));
  if (error == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  const absl::Status status = Checked(error, "cudaEventQuery");
  if (!status.ok()) return status;
  return true;
}

bool NcclDeviceFunctions::IsDeviceStream(const Stream& stream) const {
  return stream.device().type == DeviceType::kCuda;
}

absl::Status NcclDeviceFunctions::RecordOnCaller(Stream& stream, DeviceEvent event,
                                                 const Event& recorded,
                                                 std::shared_ptr<const void> event_owner) {
  return AsCudaStream(stream)->Launch([event, recorded = recorded, owner = std::move(event_owner)](
                                          cudaStream_t caller) mutable {
    const absl::Status status = Checked(cudaEventRecord(AsEvent(event), caller), "cudaEventRecord");
    recorded.Signal(status);
    return status;
  });
}

std::shared_ptr<const DevicePoint> NcclDeviceFunctions::MakePoint(
    int32_t device_index, const std::shared_ptr<void>& event) const {
  return std::make_shared<CudaDevicePoint>(device_index, AsEvent(event.get()), event);
}

}  // namespace expertmesh
