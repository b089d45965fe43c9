#ifndef EXPERTMESH_SERVER_MODEL_FINGERPRINT_H_
#define EXPERTMESH_SERVER_MODEL_FINGERPRINT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/checkpoint_index.h"

namespace expertmesh {

struct FingerprintTensor {
  const CheckpointTensor* tensor = nullptr;
  // Equal pieces of the bytes that are sampled apart: a fused tensor holds many experts.
  int64_t num_pieces = 1;
};

// Up to this many bytes in all, every byte is hashed (a second of SHA-256 reads 1 to 2 GB).
inline constexpr int64_t kFullFingerprintBytes = int64_t{256} << 20;
// Beyond it, of each piece of each tensor the first, middle and last bytes, so that a checkpoint of
// hundreds of gigabytes does not have to be read by every process before it can start. Another
// training run or another fine-tuning changes these; a single weight edited by hand may not.
inline constexpr int64_t kFingerprintSampleBytes = 512;

// SHA-256, in hex, over names, dtypes, shapes and bytes of `tensors`, in their order. How they are
// split among files does not matter. Reads the files, never their mappings. Blocking.
absl::StatusOr<std::string> ComputeFingerprint(const std::vector<FingerprintTensor>& tensors,
                                               int64_t full_bytes = kFullFingerprintBytes);

}  // namespace expertmesh

#endif  // EXPERTMESH_SERVER_MODEL_FINGERPRINT_H_
