#ifndef EXPERTMESH_SERVER_MODEL_SAFETENSORS_FILE_H_
#define EXPERTMESH_SERVER_MODEL_SAFETENSORS_FILE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/model/safetensors_header.h"

namespace expertmesh {

// A safetensors file, mapped read-only: a tensor's bytes are read from disk when they are first
// touched. Immutable and thread safe. The file must not shrink while it is open (a read of bytes
// that are gone raises SIGBUS).
class SafetensorsFile {
 public:
  // Reads and checks the whole header, none of the tensors' bytes. Every error names the file:
  // NOT_FOUND when there is none, INVALID_ARGUMENT for a broken one, otherwise as the system's
  // error.
  static absl::StatusOr<std::shared_ptr<const SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  // Ascending offsets.
  const std::vector<SafetensorsTensor>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  // Null when the file has no tensor of that name.
  const SafetensorsTensor* Find(absl::string_view name) const;

  // The bytes of a tensor of this file, valid as long as the file. Not aligned.
  absl::Span<const std::byte> Bytes(const SafetensorsTensor& tensor) const;

  // Asks the system to begin reading these bytes of `tensor`, which must lie within it.
  void Prefetch(const SafetensorsTensor& tensor, int64_t offset, int64_t size_bytes) const;

  // Copies bytes of `tensor`, which must lie within it, without touching the mapping. Errors name
  // the file.
  absl::Status Read(const SafetensorsTensor& tensor, int64_t offset,
                    absl::Span<std::byte> out) const;

 private:
  SafetensorsFile() = default;

  std::string path_;
  SafetensorsHeader header_;
  absl::flat_hash_map<absl::string_view, const SafetensorsTensor*> by_name_;
  int fd_ = -1;
  std::byte* mapping_ = nullptr;
  int64_t file_bytes_ = 0;
  int64_t data_begin_ = 0;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_SAFETENSORS_FILE_H_
