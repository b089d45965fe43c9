#include "client/cli/tensor_file.h"

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
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes->data(), static_cast<std::streamsize>(bytes->size()));
  file.close();
  if (!file) return absl::UnknownError(absl::StrCat(path, ": cannot be written"));
  return absl::OkStatus();
}

absl::Status UnknownEnding(const std::string& path) {
  return FlagError(absl::StrCat(path, ": must end with .npy or ", kSafetensorsEnding));
}

}  // namespace

absl::StatusOr<FileTensor> ReadTensorFile(const std::string& path) {
  if (absl::EndsWith(path, ".npy")) return ReadNpy(path);
  if (absl::EndsWith(path, kSafetensorsEnding)) return ReadSafetensors(path, "");
  const size_t colon = path.find(absl::StrCat(kSafetensorsEnding, ":"));
  if (colon == std::string::npos) return UnknownEnding(path);
  const size_t name_at = colon + sizeof(kSafetensorsEnding);
  return ReadSafetensors(path.substr(0, name_at - 1), path.substr(name_at));
}

absl::Status CanWriteTensorFile(const std::string& path, DType dtype) {
  const bool is_npy = absl::EndsWith(path, ".npy");
  if (!is_npy && !absl::EndsWith(path, kSafetensorsEnding)) return UnknownEnding(path);
  if (is_npy) {
    const absl::StatusOr<std::string> empty = FormatNpy(FileTensor{dtype, {0}, {}});
    if (!empty.ok()) return InFile(path, empty.status());
  }
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty() && !std::filesystem::is_directory(folder, error)) {
    return absl::NotFoundError(absl::StrCat(path, ": there is no folder ", folder.string()));
  }
  return absl::OkStatus();
}

absl::Status WriteTensorFile(const std::string& path, const std::string& name,
                             const FileTensor& tensor) {
  if (absl::EndsWith(path, ".npy")) return WriteNpy(path, tensor);
  if (absl::EndsWith(path, kSafetensorsEnding)) return WriteSafetensorsTensor(path, name, tensor);
  return UnknownEnding(path);
}

}  // namespace expertmesh
