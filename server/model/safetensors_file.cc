#include "server/model/safetensors_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/printable.h"

namespace expertmesh {
namespace {

absl::Status FileError(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat("file ", Printable(path), ": ", status.message()));
}

absl::Status SystemError(const std::string& path, absl::string_view action) {
  return FileError(path, absl::ErrnoToStatus(errno, absl::StrCat("cannot ", action)));
}

// Reads size_bytes at `offset`; INVALID_ARGUMENT when the file ends before.
absl::Status ReadFully(const std::string& path, int fd, int64_t offset, char* out,
                       int64_t size_bytes) {
  while (size_bytes > 0) {
    const ssize_t got = pread(fd, out, size_bytes, offset);
    if (got < 0) {
      if (errno == EINTR) continue;
      return SystemError(path, "read");
    }
    if (got == 0) {
      return FileError(path, absl::InvalidArgumentError(
                                 absl::StrCat("ends at byte ", offset, " while it is read")));
    }
    out += got;
    offset += got;
    size_bytes -= got;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const SafetensorsFile>> SafetensorsFile::Open(
    const std::string& path) {
  std::shared_ptr<SafetensorsFile> file(new SafetensorsFile());
  file->path_ = path;
  // O_NONBLOCK: a FIFO must be refused, not waited for.
  file->fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file->fd_ < 0) return SystemError(path, "open");
  struct stat info;
  if (fstat(file->fd_, &info) != 0) return SystemError(path, "stat");
  if (!S_ISREG(info.st_mode)) {
    return FileError(path, absl::InvalidArgumentError("is not a regular file"));
  }
  file->file_bytes_ = info.st_size;

  char prefix[kSafetensorsPrefixBytes];
  const int64_t prefix_bytes = std::min<int64_t>(kSafetensorsPrefixBytes, file->file_bytes_);
  absl::Status status = ReadFully(path, file->fd_, 0, prefix, prefix_bytes);
  if (!status.ok()) return status;
  const absl::StatusOr<int64_t> header_bytes =
      ParseSafetensorsPrefix(absl::string_view(prefix, prefix_bytes), file->file_bytes_);
  if (!header_bytes.ok()) return FileError(path, header_bytes.status());
  std::string json(*header_bytes, '\0');
  status = ReadFully(path, file->fd_, kSafetensorsPrefixBytes, json.data(), *header_bytes);
  if (!status.ok()) return status;
  file->data_begin_ = kSafetensorsPrefixBytes + *header_bytes;
  absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(json, file->file_bytes_ - file->data_begin_);
  if (!header.ok()) return FileError(path, header.status());
  file->header_ = *std::move(header);
  for (const SafetensorsTensor& tensor : file->header_.tensors) {
    file->by_name_.emplace(tensor.name, &tensor);
  }

  void* mapping =
      mmap(nullptr, file->file_bytes_, PROT_READ, MAP_SHARED | MAP_NORESERVE, file->fd_, 0);
  if (mapping == MAP_FAILED) return SystemError(path, "map");
  file->mapping_ = static_cast<std::byte*>(mapping);
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (mapping_ != nullptr) munmap(mapping_, file_bytes_);
  if (fd_ >= 0) close(fd_);
}

const SafetensorsTensor* SafetensorsFile::Find(absl::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : it->second;
}

absl::Span<const std::byte> SafetensorsFile::Bytes(const SafetensorsTensor& tensor) const {
  return absl::MakeConstSpan(mapping_ + data_begin_ + tensor.begin_offset, tensor.size_bytes());
}

void SafetensorsFile::Prefetch(const SafetensorsTensor& tensor, int64_t offset,
                               int64_t size_bytes) const {
  if (size_bytes <= 0) return;
  static const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const int64_t begin = data_begin_ + tensor.begin_offset + offset;
  const int64_t first_page = begin / page_bytes * page_bytes;
  // Advice alone: reading works without it.
  (void)madvise(mapping_ + first_page, begin + size_bytes - first_page, MADV_WILLNEED);
}

absl::Status SafetensorsFile::Read(const SafetensorsTensor& tensor, int64_t offset,
                                   absl::Span<std::byte> out) const {
  return ReadFully(path_, fd_, data_begin_ + tensor.begin_offset + offset,
                   reinterpret_cast<char*>(out.data()), static_cast<int64_t>(out.size()));
}

}  // namespace expertmesh
