#ifndef EXPERTMESH_CLIENT_CLI_TENSOR_FILE_H_
#define EXPERTMESH_CLIENT_CLI_TENSOR_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/dtype.h"

namespace expertmesh {

// A dense row-major little-endian tensor in memory.
struct FileTensor {
  DType dtype = DType::kInvalid;
  std::vector<int64_t> shape;
  std::vector<std::byte> data;
};

// `path` is `FILE.npy`, or `FILE.safetensors:TENSOR` (the name may be left out when the file has
// one tensor). NumPy files may hold float32, float16, int32 or int64 in C order (NumPy has no
// bfloat16). Errors name the file and what is wrong.
absl::StatusOr<FileTensor> ReadTensorFile(const std::string& path);

// By the same endings; bfloat16 is written to safetensors alone. `name` names the tensor there.
absl::Status WriteTensorFile(const std::string& path, const std::string& name,
                             const FileTensor& tensor);

// What of it the path alone shows to be wrong: FlagErrors.
absl::Status CheckTensorFileToRead(const std::string& path);
absl::Status CheckTensorFileToWrite(const std::string& path);
// Whether that kind of file, which its ending names, holds elements of that type.
absl::Status CheckTensorFileHolds(const std::string& path, DType dtype);

// What WriteTensorFile would refuse, known before there is a tensor: the ending (a FlagError), the
// element type, a missing folder, one in the file's place, one that may not be written to.
absl::Status CanWriteTensorFile(const std::string& path, DType dtype);

// NumPy's file format, versions 1 to 3 (numpy.lib.format in NumPy's documentation).
absl::StatusOr<FileTensor> ParseNpy(absl::string_view bytes);
absl::StatusOr<std::string> FormatNpy(const FileTensor& tensor);

}  // namespace expertmesh

#endif  // EXPERTMESH_CLIENT_CLI_TENSOR_FILE_H_
