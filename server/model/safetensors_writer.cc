#include "server/model/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/checked_math.h"
#include "server/model/printable.h"
#include "server/model/safetensors_header.h"

namespace expertmesh {
namespace {

constexpr size_t kDataAlignment = 8;

absl::Status SystemError(const std::string& path, absl::string_view action) {
  const absl::Status status = absl::ErrnoToStatus(errno, absl::StrCat("cannot ", action));
  return absl::Status(status.code(),
                      absl::StrCat("file ", Printable(path), ": ", status.message()));
}

absl::StatusOr<int64_t> SizeBytes(const SafetensorsDeclaration& tensor) {
  std::optional<int64_t> bits = StoredDTypeBits(tensor.dtype);
  for (const int64_t extent : tensor.shape) {
    bits = extent < 0 ? std::nullopt : CheckedMul(*bits, extent);
    if (!bits.has_value()) break;
  }
  if (!bits.has_value() || *bits % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", Printable(tensor.name), ": shape ", ShapeText(tensor.shape), " of ",
                     StoredDTypeName(tensor.dtype), " is no size in whole bytes of 64 bits"));
  }
  return *bits / 8;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, const std::vector<SafetensorsDeclaration>& tensors,
    const std::map<std::string, std::string>& metadata) {
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter());
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const SafetensorsDeclaration& tensor : tensors) {
    const absl::StatusOr<int64_t> size_bytes = SizeBytes(tensor);
    if (!size_bytes.ok()) return size_bytes.status();
    const std::optional<int64_t> end = CheckedAdd(offset, *size_bytes);
    if (!end.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", Printable(tensor.name), ": the file's size overflows 64 bits"));
    }
    writer->names_.push_back(tensor.name);
    writer->size_bytes_.push_back(*size_bytes);
    offset = *end;
  }
  // nlohmann::ordered_json looks a key up by linear search; emplacing at the back does not.
  auto& object = header.get_ref<nlohmann::ordered_json::object_t&>();
  int64_t begin = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t end = begin + writer->size_bytes_[i];
    object.emplace_back(tensors[i].name,
                        nlohmann::ordered_json{
                            {"dtype", std::string(StoredDTypeName(tensors[i].dtype))},
                            {"shape", tensors[i].shape},
                            {"data_offsets", {begin, end}},
                        });
    begin = end;
  }
  std::string json;
  try {
    json = header.dump();
  } catch (const nlohmann::json::exception&) {
    return absl::InvalidArgumentError("a tensor's name or metadata is no UTF-8");
  }
  while ((kSafetensorsPrefixBytes + json.size()) % kDataAlignment != 0) json.push_back(' ');
  // What we write must pass what we demand of others: duplicates, reserved names, the size cap.
  if (static_cast<int64_t>(json.size()) > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "header has ", json.size(), " bytes; expected at most ", kMaxSafetensorsHeaderBytes));
  }
  const absl::StatusOr<SafetensorsHeader> parsed = ParseSafetensorsHeader(json, offset);
  if (!parsed.ok()) return parsed.status();

  writer->path_ = path;
  const std::string partial_path = absl::StrCat(path, ".partial");
  writer->fd_ = open(partial_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (writer->fd_ < 0) return SystemError(partial_path, "create");
  writer->partial_path_ = partial_path;
  char prefix[kSafetensorsPrefixBytes];
  for (int i = 0; i < kSafetensorsPrefixBytes; ++i) {
    prefix[i] = static_cast<char>(static_cast<uint64_t>(json.size()) >> (8 * i));
  }
  absl::Status status = writer->Write(prefix, sizeof(prefix));
  if (status.ok()) status = writer->Write(json.data(), static_cast<int64_t>(json.size()));
  if (!status.ok()) return status;
  return writer;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ >= 0) close(fd_);
  if (!partial_path_.empty()) unlink(partial_path_.c_str());
}

absl::Status SafetensorsWriter::Write(const char* data, int64_t size_bytes) {
  while (size_bytes > 0) {
    const ssize_t written = write(fd_, data, size_bytes);
    if (written < 0) {
      if (errno == EINTR) continue;
      return SystemError(partial_path_, "write");
    }
    data += written;
    size_bytes -= written;
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Append(absl::Span<const std::byte> bytes) {
  SkipWhole();
  const int64_t num_bytes = static_cast<int64_t>(bytes.size());
  if (num_bytes == 0) return absl::OkStatus();
  if (current_ == names_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("all ", names_.size(), " declared tensors are written already"));
  }
  if (num_bytes > size_bytes_[current_] - written_bytes_) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", Printable(names_[current_]), ": got ",
                                                   written_bytes_ + num_bytes, " bytes; declared ",
                                                   size_bytes_[current_]));
  }
  written_bytes_ += num_bytes;
  return Write(reinterpret_cast<const char*>(bytes.data()), num_bytes);
}

void SafetensorsWriter::SkipWhole() {
  while (current_ < names_.size() && written_bytes_ == size_bytes_[current_]) {
    ++current_;
    written_bytes_ = 0;
  }
}

absl::Status SafetensorsWriter::Finish() {
  SkipWhole();
  if (current_ != names_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", Printable(names_[current_]), ": got ",
                                                   written_bytes_, " bytes; declared ",
                                                   size_bytes_[current_]));
  }
  const int fd = std::exchange(fd_, -1);
  if (close(fd) != 0) return SystemError(partial_path_, "close");
  if (rename(partial_path_.c_str(), path_.c_str()) != 0) return SystemError(path_, "rename to");
  partial_path_.clear();
  return absl::OkStatus();
}

absl::Status WriteSafetensors(const std::string& path,
                              const std::vector<SafetensorsToWrite>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsDeclaration> declarations;
  declarations.reserve(tensors.size());
  for (const SafetensorsToWrite& tensor : tensors) declarations.push_back(tensor.declaration);
  absl::StatusOr<std::unique_ptr<SafetensorsWriter>> writer =
      SafetensorsWriter::Create(path, declarations, metadata);
  if (!writer.ok()) return writer.status();
  for (const SafetensorsToWrite& tensor : tensors) {
    const absl::Status status = (*writer)->Append(tensor.bytes);
    if (!status.ok()) return status;
  }
  return (*writer)->Finish();
}

}  // namespace expertmesh
