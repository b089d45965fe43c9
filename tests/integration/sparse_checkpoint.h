#ifndef EXPERTMESH_TESTS_INTEGRATION_SPARSE_CHECKPOINT_H_
#define EXPERTMESH_TESTS_INTEGRATION_SPARSE_CHECKPOINT_H_

#include <cstdint>
#include <string>

namespace expertmesh {

// Loading and computing are ten and more times as slow under a sanitizer.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int64_t kSlowdown = 10;
#else
inline constexpr int64_t kSlowdown = 1;
#endif

struct SparseCheckpointShape {
  int64_t hidden_size = 2048;
  int64_t intermediate_size = 2720 / kSlowdown;
  int32_t num_experts = 8;
  int64_t total_bytes() const { return 6 * hidden_size * intermediate_size * num_experts; }
};

// A folder with a Mixtral checkpoint of one layer, bfloat16, all zeros, without gate weights: holes
// in a file, so it takes no disk, yet loading and computing it take as long as any of its size. It
// is removed when this object goes.
class SparseCheckpoint {
 public:
  explicit SparseCheckpoint(const SparseCheckpointShape& shape);
  ~SparseCheckpoint();
  SparseCheckpoint(const SparseCheckpoint&) = delete;
  SparseCheckpoint& operator=(const SparseCheckpoint&) = delete;

  const std::string& path() const { return path_; }
  const SparseCheckpointShape& shape() const { return shape_; }

 private:
  SparseCheckpointShape shape_;
  std::string path_;
};

}  // namespace expertmesh

#endif  // EXPERTMESH_TESTS_INTEGRATION_SPARSE_CHECKPOINT_H_
