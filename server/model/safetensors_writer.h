#ifndef EXPERTMESH_SERVER_MODEL_SAFETENSORS_WRITER_H_
#define EXPERTMESH_SERVER_MODEL_SAFETENSORS_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/model/stored_dtype.h"

namespace expertmesh {

struct SafetensorsDeclaration {
  std::string name;
  StoredDType dtype = StoredDType::kF32;
  std::vector<int64_t> shape;
};

// Writes a safetensors file tensor by tensor, so that it may be larger than memory. Everything goes
// to `path`.partial first and gets its name in Finish: a file of that name is always whole. Not
// thread safe.
class SafetensorsWriter {
 public:
  // Writes the header; data begins at a multiple of 8 bytes. INVALID_ARGUMENT for a name that
  // occurs twice or is "__metadata__", text that is no UTF-8, shapes whose bytes overflow or are
  // not whole.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, const std::vector<SafetensorsDeclaration>& tensors,
      const std::map<std::string, std::string>& metadata = {});
  // Removes the partial file when Finish has not succeeded.
  ~SafetensorsWriter();

  // The next bytes, a tensor or a piece of one, in the order of the declaration. INVALID_ARGUMENT
  // when they reach beyond the tensor's end: a piece belongs to one tensor.
  absl::Status Append(absl::Span<const std::byte> bytes);
  // INVALID_ARGUMENT when bytes are missing.
  absl::Status Finish();

 private:
  SafetensorsWriter() = default;
  absl::Status Write(const char* data, int64_t size_bytes);
  void SkipWhole();  // goes on to the first tensor that lacks bytes

  std::string path_;
  std::string partial_path_;
  int fd_ = -1;
  std::vector<std::string> names_;
  std::vector<int64_t> size_bytes_;
  size_t current_ = 0;         // tensor
  int64_t written_bytes_ = 0;  // of it
};

struct SafetensorsToWrite {
  SafetensorsDeclaration declaration;
  absl::Span<const std::byte> bytes;
};

// All at once.
absl::Status WriteSafetensors(const std::string& path,
                              const std::vector<SafetensorsToWrite>& tensors,
                              const std::map<std::string, std::string>& metadata = {});

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_SAFETENSORS_WRITER_H_
