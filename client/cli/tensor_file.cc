#include "client/cli/tensor_file.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/cli/flag_error.h"
#include "server/model/safetensors_file.h"
#include "server/model/safetensors_writer.h"
#include "server/model/stored_dtype.h"
#include "server/ops/few_of.h"

namespace expertmesh {
namespace {

constexpr char kSafetensorsEnding[] = ".safetensors";

// The same error with the file's name before it.
absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

// Says why, by errno.
absl::Status CannotBeWritten(const std::string& path) {
  return absl::ErrnoToStatus(errno != 0 ? errno : EIO, absl::StrCat(path, ": cannot be written"));
}

absl::StatusOr<FileTensor> ReadNpy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, " cannot be read"));
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  absl::StatusOr<FileTensor> tensor = ParseNpy(bytes);
  return tensor.ok() ? std::move(tensor) : InFile(path, tensor.status());
}

absl::StatusOr<FileTensor> ReadSafetensors(const std::string& path, const std::string& name) {
  const auto file = SafetensorsFile::Open(path);
  if (!file.ok()) return file.status();
  const std::vector<SafetensorsTensor>& tensors = (*file)->tensors();
  const SafetensorsTensor* tensor = nullptr;
  if (!name.empty()) {
    tensor = (*file)->Find(name);
  } else if (tensors.size() == 1) {
    tensor = &tensors[0];
  }
  if (tensor == nullptr) {
    std::vector<std::string> names;
    for (const SafetensorsTensor& each : tensors) names.push_back(each.name);
    return absl::NotFoundError(
        absl::StrCat(path,
                     name.empty() ? ": name one of its tensors after a colon: "
                                  : absl::StrCat(": has no tensor ", name, "; it has "),
                     FewOf(names)));
  }
  FileTensor result;
  result.shape = tensor->shape;
  const std::optional<DType> dtype = ToDType(tensor->dtype);
  if (!dtype.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", tensor->name,
                                                   ": element type ",
                                                   StoredDTypeName(tensor->dtype), " is not read"));
  }
  result.dtype = *dtype;
  const absl::Span<const std::byte> bytes = (*file)->Bytes(*tensor);
  result.data.assign(bytes.begin(), bytes.end());
  return result;
}

absl::Status WriteSafetensorsTensor(const std::string& path, const std::string& name,
                                    const FileTensor& tensor) {
  const std::optional<StoredDType> dtype = ToStoredDType(tensor.dtype);
  if (!dtype.has_value()) return absl::InvalidArgumentError("element type cannot be written");
  return WriteSafetensors(path, {{{name, *dtype, tensor.shape}, tensor.data}});
}

absl::Status WriteNpy(const std::string& path, const FileTensor& tensor) {
  const absl::StatusOr<std::string> bytes = FormatNpy(tensor);
  if (!bytes.ok()) return InFile(path, bytes.status());
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes->data(), static_cast<std::streamsize>(bytes->size()));
  file.close();
  if (!file) return CannotBeWritten(path);
  return absl::OkStatus();
}

bool IsNpy(const std::string& path) { return absl::EndsWith(path, ".npy"); }
bool IsSafetensors(const std::string& path) { return absl::EndsWith(path, kSafetensorsEnding); }
bool NamesATensor(const std::string& path) {
  return absl::StrContains(path, absl::StrCat(kSafetensorsEnding, ":"));
}

absl::Status UnknownEnding(const std::string& path) {
  return FlagError(absl::StrCat(path, ": must end with .npy or ", kSafetensorsEnding));
}

}  // namespace

absl::StatusOr<FileTensor> ReadTensorFile(const std::string& path) {
  if (IsNpy(path)) return ReadNpy(path);
  if (IsSafetensors(path)) return ReadSafetensors(path, "");
  const size_t colon = path.find(absl::StrCat(kSafetensorsEnding, ":"));
  if (colon == std::string::npos) return UnknownEnding(path);
  const size_t name_at = colon + sizeof(kSafetensorsEnding);
  return ReadSafetensors(path.substr(0, name_at - 1), path.substr(name_at));
}

absl::Status CheckTensorFileToRead(const std::string& path) {
  return IsNpy(path) || IsSafetensors(path) || NamesATensor(path) ? absl::OkStatus()
                                                                  : UnknownEnding(path);
}

absl::Status CheckTensorFileToWrite(const std::string& path) {
  return IsNpy(path) || IsSafetensors(path) ? absl::OkStatus() : UnknownEnding(path);
}

absl::Status CheckTensorFileHolds(const std::string& path, DType dtype) {
  if (!IsNpy(path)) return absl::OkStatus();
  const absl::StatusOr<std::string> empty = FormatNpy(FileTensor{dtype, {0}, {}});
  return empty.ok() ? absl::OkStatus() : InFile(path, empty.status());
}

absl::Status CanWriteTensorFile(const std::string& path, DType dtype) {
  if (absl::Status status = CheckTensorFileToWrite(path); !status.ok()) return status;
  if (absl::Status status = CheckTensorFileHolds(path, dtype); !status.ok()) return status;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty() && !std::filesystem::is_directory(folder, error)) {
    return absl::NotFoundError(absl::StrCat(path, ": there is no folder ", folder.string()));
  }
  if (std::filesystem::is_directory(path, error)) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": is a folder"));
  }
  // A NumPy file is written in its place, the other one is put there when it is whole.
  const bool in_place = IsNpy(path) && std::filesystem::exists(path, error);
  const std::string written_to = in_place ? path : folder.empty() ? "." : folder.string();
  if (access(written_to.c_str(), W_OK) != 0) return CannotBeWritten(path);
  return absl::OkStatus();
}

absl::Status WriteTensorFile(const std::string& path, const std::string& name,
                             const FileTensor& tensor) {
  if (IsNpy(path)) return WriteNpy(path, tensor);
  if (IsSafetensors(path)) return WriteSafetensorsTensor(path, name, tensor);
  return UnknownEnding(path);
}

}  // namespace expertmesh
