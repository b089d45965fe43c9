#include "kernels/cuda/cuda_upload.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"

namespace expertmesh {
namespace {

constexpr int64_t kPartAlignment = 256;

int64_t Extend(int64_t* total, int64_t size_bytes) {
  const int64_t offset = *total;
  *total += (size_bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  return offset;
}

}  // namespace

int64_t CudaUpload::Reserve(int64_t size_bytes) { return Extend(&upload_bytes_, size_bytes); }

int64_t CudaUpload::ReserveOnDevice(int64_t size_bytes) {
  return Extend(&device_only_bytes_, size_bytes);
}

absl::Status CudaUpload::Allocate() {
  absl::StatusOr<Buffer> host = allocators_.pinned->Allocate(upload_bytes_);
  if (!host.ok()) return host.status();
  absl::StatusOr<Buffer> device = allocators_.device->Allocate(upload_bytes_ + device_only_bytes_);
  if (!device.ok()) return device.status();
  host_ = *std::move(host);
  device_ = *std::move(device);
  return absl::OkStatus();
}

absl::Status CudaUpload::Copy(cudaStream_t stream) const {
  if (host_.empty()) return absl::OkStatus();
  return CudaStatus(
      cudaMemcpyAsync(device_.data(), host_.data(), static_cast<size_t>(host_.size_bytes()),
                      cudaMemcpyHostToDevice, stream),
      absl::StrCat("cudaMemcpyAsync(", host_.size_bytes(), ")"),
      allocators_.device->device().index);
}

absl::Status CudaUpload::FreeAfter(Stream& stream, std::shared_ptr<CudaUpload> upload) {
  const Event passed;
  absl::Status status = stream.Record(passed);
  passed.OnDone([upload = std::move(upload)] {});
  return status;
}

}  // namespace expertmesh
