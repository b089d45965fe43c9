#include "server/flag_values.h"

#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/cuda_support.h"
#include "server/ops/listen_address.h"
#include "server/ops/logging.h"

namespace expertmesh {
namespace {

constexpr int kMaxThreads = 4096;

}  // namespace

absl::StatusOr<std::optional<CpuIsa>> ParseIsaFlag(const std::string& name) {
  if (name == "auto") return std::nullopt;
  std::string known = "auto";
  for (const CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512Bf16}) {
    if (name == CpuIsaName(isa)) return isa;
    absl::StrAppend(&known, ", ", CpuIsaName(isa));
  }
  return absl::InvalidArgumentError(absl::StrCat("--isa is '", name, "'; known: ", known));
}

absl::StatusOr<std::shared_ptr<CudaDevice>> OpenDeviceFlag(const std::string& value,
                                                           const CudaDeviceOptions& options) {
  if (value == "cpu") return nullptr;
  constexpr absl::string_view kCuda = "cuda:";
  int32_t index = -1;
  if (!absl::StartsWith(value, kCuda) ||
      !absl::SimpleAtoi(absl::string_view(value).substr(kCuda.size()), &index) || index < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--device is '", value, "'; known: cpu, cuda:0, cuda:1, ..."));
  }
  // Else each kernel's code is loaded at its first launch, in a step: that takes a client's time,
  // and may wait for all that the device does, an exchange with other ranks included. Whoever has
  // set it knows better.
  setenv("CUDA_MODULE_LOADING", "EAGER", /*replace=*/0);
  absl::StatusOr<std::shared_ptr<CudaDevice>> device = OpenCudaOfThisBuild(index, options);
  if (device.ok()) return device;
  return absl::Status(device.status().code(),
                      absl::StrCat("--device=", value, ": ", device.status().message()));
}

absl::StatusOr<Fp8Weights> ParseFp8WeightsFlag(const std::string& value, bool on_gpu) {
  if (value == "auto") return on_gpu ? Fp8Weights::kNativeIfPossible : Fp8Weights::kDequantize;
  if (value == "dequantize") return Fp8Weights::kDequantize;
  if (value != "native") {
    return absl::InvalidArgumentError(
        absl::StrCat("--fp8_weights is '", value, "'; known: auto, native, dequantize"));
  }
  if (on_gpu) return Fp8Weights::kNative;
  return absl::InvalidArgumentError(
      "--fp8_weights=native needs --device=cuda:N: kernels of CPUs take no float8_e4m3");
}

void WarnOfSlowDevice(const CudaDevice* device) {
  if (device == nullptr || device->has_tensor_core_kernels()) return;
  LogWarning(
      "this build has no tensor core kernels for the GPU, as for sm_90 (H100, H200): experts "
      "compute on its other cores, many times slower",
      {{"device", absl::StrCat("cuda:", device->index())}, {"isa", device->instruction_set()}});
}

absl::Status CheckPositive(const char* flag, int64_t value) {
  if (value > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", value, "; at least 1"));
}

absl::Status CheckPositive(const char* flag, absl::Duration value) {
  if (value > absl::ZeroDuration()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " is ", absl::FormatDuration(value), "; must be above 0"));
}

absl::Status CheckNotNegative(const char* flag, absl::Duration value) {
  if (value >= absl::ZeroDuration()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " is ", absl::FormatDuration(value), "; at least 0"));
}

absl::Status CheckNotNegative(const char* flag, int64_t value) {
  if (value >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", value, "; at least 0"));
}

absl::Status CheckAtLeast(const char* flag, absl::Duration value, absl::Duration limit) {
  if (value >= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", absl::FormatDuration(value),
                                                 "; at least ", absl::FormatDuration(limit)));
}

absl::Status CheckAtMost(const char* flag, int64_t value, int64_t limit) {
  if (value <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", value, "; at most ", limit));
}

absl::Status CheckBetween(const char* flag, ByteSize value, ByteSize least, ByteSize most) {
  if (value.bytes >= least.bytes && value.bytes <= most.bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", AbslUnparseFlag(value), "; ",
                                                 AbslUnparseFlag(least), " to ",
                                                 AbslUnparseFlag(most)));
}

absl::Status CheckThreads(int value) {
  const absl::Status status = CheckNotNegative("threads", value);
  return status.ok() ? CheckAtMost("threads", value, kMaxThreads) : status;
}

absl::Status CheckGrpcListenFlag(const char* flag, const std::string& value) {
  return absl::StartsWith(value, "unix:") ? absl::OkStatus() : CheckListenAddress(flag, value);
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ParseModelFlags(
    const std::string& checkpoint, const std::string& model_name,
    const std::vector<std::string>& models) {
  std::vector<std::pair<std::string, std::string>> folders;
  if (!checkpoint.empty()) folders.emplace_back(model_name, checkpoint);
  for (const std::string& text : models) {
    const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
    if (parts.size() != 2 || parts[0].empty() || parts[1].empty()) {
      return absl::InvalidArgumentError(absl::StrCat("--model has '", text, "'; NAME=DIR"));
    }
    folders.emplace_back(parts[0], parts[1]);
  }
  if (folders.empty()) return absl::InvalidArgumentError("--checkpoint is missing");
  return folders;
}

}  // namespace expertmesh
