#ifndef EXPERTMESH_SERVER_MODEL_CHECKPOINT_INDEX_H_
#define EXPERTMESH_SERVER_MODEL_CHECKPOINT_INDEX_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/model/safetensors_file.h"

namespace expertmesh {

// One tensor of a checkpoint and the file that holds it. Both live as long as the index.
struct CheckpointTensor {
  std::shared_ptr<const SafetensorsFile> file;
  const SafetensorsTensor* tensor = nullptr;

  absl::Span<const std::byte> bytes() const { return file->Bytes(*tensor); }
};

// Where a checkpoint directory's tensors are: in `model.safetensors`, or in the files that
// `model.safetensors.index.json` names. Immutable and thread safe.
class CheckpointIndex {
 public:
  // Opens all files and checks all headers; every tensor of the index must be in its file. Errors
  // name file and rule. Names of files must be plain: a path could lead out of the directory.
  static absl::StatusOr<CheckpointIndex> Open(const std::string& directory);

  const std::string& directory() const { return directory_; }
  const std::vector<std::shared_ptr<const SafetensorsFile>>& files() const { return files_; }
  // Null when there is no such tensor.
  const CheckpointTensor* Find(absl::string_view name) const;
  // "file 'x': tensor 'y'", for messages.
  static std::string Describe(const CheckpointTensor& tensor);

 private:
  CheckpointIndex() = default;
  absl::Status AddShards(const std::string& index_path);
  absl::Status AddWholeFile(const std::string& path);

  std::string directory_;
  std::vector<std::shared_ptr<const SafetensorsFile>> files_;
  absl::flat_hash_map<std::string, CheckpointTensor> tensors_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_CHECKPOINT_INDEX_H_
